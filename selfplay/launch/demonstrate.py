"""Games of scripted players, recorded as if a model had played them: the chats it would be given, the moves as its answers.

In: an environment, the agent kind that shows how to answer, a tokenizer. Out: episodes with the tokens of every turn, which
`episode_segments` turns into what a model can learn from.
"""

# ruff: noqa: ARG002 - a client's protocol brings more than is read here

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence

import msgspec

from selfplay.agent import Answer, Decision, Message, Player, Sampling
from selfplay.environment import JuryQuestion
from selfplay.errors import UserError
from selfplay.play import PolicyJury, play, sit_down
from selfplay.policy.rendering import ChatTokenizer, Renderer
from selfplay.registry import EnvironmentSpec, environment_source, make_environment
from selfplay.types import BASE, Episode, Limits, Match, Scalar, SeatAssignment, Span, derive_seed


class Dictation:
    """A policy client that renders like a server and answers what it was told to say, with the end of the turn."""

    def __init__(self, chat: ChatTokenizer) -> None:
        self._renderer, self._stop = Renderer(chat), _end_of_turn(chat)
        self.text = ""
        """What the next answer is."""

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
        """See `PolicyClient.generate`."""
        delta = self._renderer.render(messages, known_messages, prefix_ids)
        said = (*self._renderer.encode_plain(self.text), self._stop)
        return Answer(
            text=self.text, prompt_ids=delta.ids, fork=delta.fork, sampled_ids=said, logprobs=(0.0,) * len(said),
            spans=(Span(0, 0, len(said)),), stop_reason="stop",
        )  # fmt: skip

    async def choose(self, agent: str, pin: str | int, question: JuryQuestion) -> Mapping[str, float]:
        """A jury's word does not matter here: nothing is learnt from the outcome."""
        return {label: 1.0 / len(question.labels) for label in question.labels}


class Demonstrator:
    """A player whose move a scripted player chooses and whose chat is the model player's."""

    def __init__(self, teacher: Player, pupil: Player, dictation: Dictation) -> None:
        self._teacher, self._pupil, self._dictation = teacher, pupil, dictation

    async def decide(self, decision: Decision) -> Answer:
        """What the teacher moves, as the pupil would be asked and would say it."""
        answer = await self._teacher.decide(decision)
        self._dictation.text = answer.text
        return await self._pupil.decide(decision)

    async def close(self) -> None:
        await self._teacher.close()
        await self._pupil.close()


def demonstrations(
    spec: EnvironmentSpec, params: Mapping[str, Scalar], *, teacher: str, num: int, seed: int,
    chat: ChatTokenizer, opponent: str = "", options: Mapping[str, Mapping[str, Scalar]] | None = None,
) -> list[Episode]:  # fmt: skip
    """``num`` games of ``teacher`` at every seat, or at one seat after the other against ``opponent``; trained seats are the
    teacher's. ``options``: seat → those of the model player, as it is asked in play. Raises `UserError` when they cannot play."""
    return asyncio.run(_games(spec, dict(params), (teacher, opponent), num, seed, chat, options or {}))


async def _games(
    spec: EnvironmentSpec, params: dict[str, Scalar], kinds: tuple[str, str], num: int, seed: int,
    chat: ChatTokenizer, options: Mapping[str, Mapping[str, Scalar]],
) -> list[Episode]:  # fmt: skip
    (teacher, opponent), episodes = kinds, []
    for index in range(num):
        shows = (spec.seats[index % len(spec.seats)],) if opponent else spec.seats
        match = Match(
            index=index, env=spec.id, env_params=params, seed=derive_seed(seed, "demonstration", index),
            seats=tuple(
                SeatAssignment(seat=s, player="llm", agent=s, trained=s in shows, options=dict(options.get(s, {})))
                for s in spec.seats
            ),
            limits=Limits(max_turns=spec.max_turns),
        )  # fmt: skip
        by = {s: teacher if s in shows else opponent for s in spec.seats}
        episodes.append(await _game(spec, match, by, Dictation(chat)))
    if not any(turn.legal for e in episodes for turn in e.turns):
        raise UserError(f"player {teacher!r} makes no legal move in {spec.id}: set warm_start.player to one that can")
    return episodes


async def _game(spec: EnvironmentSpec, match: Match, by: Mapping[str, str], dictation: Dictation) -> Episode:
    """``by``: seat → who chooses its moves."""
    environment = make_environment(match.env, match.env_params, match.seed)
    pupils = sit_down(match, dictation, Sampling(), environment)
    scripted = msgspec.structs.replace(
        match, seats=tuple(SeatAssignment(seat=s, player=by[s], agent=by[s]) for s in spec.seats)
    )
    teachers = sit_down(scripted, None, Sampling(), environment)
    players = {s: Demonstrator(teachers[s], pupils[s], dictation) for s in spec.seats}
    return await play(
        match.env,
        environment,
        players,
        match,
        jury=PolicyJury(dictation, BASE),
        env_source=environment_source(match.env),
    )


def _end_of_turn(chat: ChatTokenizer) -> int:
    """The stop token that the template itself writes after an answer; another one where it writes none."""
    dialogue = [Message("user", "?"), Message("assistant", "!")]
    written = chat.encode(chat.template(dialogue, add_generation_prompt=False))
    return next((token for token in reversed(written) if token in chat.stop_ids), chat.stop_ids[0])
