"""The agent protocol: who can sit at a seat, and how a model is asked.

The play loop creates one `Player` per seat and episode, and asks it with a `Decision`. A player that needs a model asks
through the `PolicyClient` it was given; it never sees a tokenizer, tensors, or another seat's view.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Protocol

import msgspec

from selfplay.environment import JuryQuestion
from selfplay.types import Scalar, SeatAssignment, Span, StopReason


class Decision(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """One request to a seat. ``complaint`` says why the previous try of the same decision was illegal."""

    seat: str
    round: int
    rules: str
    view: str
    legal_moves: tuple[str, ...] | None
    complaint: str = ""
    suggestions: tuple[str, ...] = ()
    """For players that cannot read: answers worth trying where any text is a move."""


class Answer(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """What a player said, with the token record when a model said it (shapes as in `selfplay.types.Turn`)."""

    text: str
    prompt_ids: tuple[int, ...] = ()
    fork: bool = False
    sampled_ids: tuple[int, ...] = ()
    logprobs: tuple[float, ...] = ()
    spans: tuple[Span, ...] = ()
    kept: tuple[tuple[int, ...], ...] = ()
    stop_reason: StopReason = "none"


class Player(Protocol):
    """One seat's mind for one episode."""

    async def decide(self, decision: Decision) -> Answer:
        """Answer a decision. May be cancelled; must then leave nothing running."""
        ...

    async def close(self) -> None:
        """The episode is over, however it ended."""
        ...


class Message(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One chat message; ``role`` is ``system``, ``user`` or ``assistant``."""

    role: str
    content: str


class Sampling(msgspec.Struct, frozen=True, kw_only=True):
    """How a model samples. Every field is always sent: no defaults of a model folder apply."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    """0: all tokens."""
    max_tokens: int = 64
    seed: int | None = None


class PolicyClient(Protocol):
    """The way to models from inside an environment worker."""

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
        """Continue a chat. ``prefix_ids`` are the exact context so far, covering the first ``known_messages`` messages
        (the last of them the model's own); the server renders only what is new, or forks when the template rewrote
        history. Raises `EngineError` when no answer can come."""
        ...

    async def choose(self, agent: str, pin: str | int, question: JuryQuestion) -> Mapping[str, float]:
        """Probability of each label of ``question`` under ``agent`` (they sum to 1)."""
        ...


class PlayerContext(msgspec.Struct, frozen=True, kw_only=True):
    """What a player is made from."""

    assignment: SeatAssignment
    episode_id: str
    rng: random.Random
    """The seat's own generator, derived from the match seed."""
    policy: PolicyClient | None
    """None where no model is served (for example ``selfplay play`` between bots)."""
    sampling: Sampling
    env_id: str
    options: dict[str, Scalar]


class PlayerFactory(Protocol):
    """What an entry point of group ``selfplay.agents`` names: makes one player for one seat of one episode."""

    def __call__(self, context: PlayerContext) -> Player: ...
