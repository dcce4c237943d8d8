"""Prompts exactly as in play: the player itself is asked, and what it would send to the model is caught on the way.

In: an information state of a game tree and an agent kind with its options. Out: the chat that the model would be given there,
after the seat's own earlier moves said as plain moves.
"""

# ruff: noqa: ARG002 - a client's protocol brings more than is read here

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence

from selfplay.agent import Answer, Message, PlayerContext, Sampling
from selfplay.environment import JuryQuestion
from selfplay.errors import UserError
from selfplay.evaluation.tree import GameTree, InfoState
from selfplay.registry import load_agent
from selfplay.types import BASE, Scalar, SeatAssignment

_TOKENS = (0, 0)
"""Stands for a context: whoever asks needs one, nobody here reads it."""


class _Catcher:
    """A policy client that keeps the last chat and answers what it was told to."""

    def __init__(self) -> None:
        self.messages: tuple[Message, ...] = ()
        self.answer = ""

    async def generate(
        self,
        assignment: SeatAssignment,
        *,
        episode_id: str,
        messages: Sequence[Message],
        known_messages: int,
        prefix_ids: Sequence[int],
        sampling: Sampling,
    ) -> Answer:
        self.messages = tuple(messages)
        return Answer(
            text=self.answer, prompt_ids=_TOKENS, sampled_ids=_TOKENS, logprobs=(0.0, 0.0), stop_reason="stop"
        )

    async def choose(self, agent: str, pin: str | int, question: JuryQuestion) -> Mapping[str, float]:
        raise UserError("a player asked a jury question while its prompts were read")


async def prompt_of(
    tree: GameTree, state: InfoState, *, player: str = "llm", options: Mapping[str, Scalar] | None = None
) -> tuple[Message, ...]:
    """The chat at ``state``. Raises `UserError` for a player that asks no model."""
    options = dict(options or {})
    catcher = _Catcher()
    assignment = SeatAssignment(seat=state.decision.seat, player=player, agent=BASE, options=options)
    mind = load_agent(player)(
        PlayerContext(
            assignment=assignment, episode_id="0.0", rng=random.Random(0), policy=catcher, sampling=Sampling(),
            env_id=tree.env_id, options=options,
        )
    )  # fmt: skip
    for decision, move in state.past:
        catcher.answer = move
        await mind.decide(decision)
    await mind.decide(state.decision)
    await mind.close()
    if not catcher.messages:
        raise UserError(f"player {player!r} asks no model: its prompts cannot be read")
    return catcher.messages
