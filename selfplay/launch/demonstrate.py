"""Games of scripted players, recorded as if a model had played them: the chats it would be given, the moves as its answers.

In: an environment, the agent kind that shows how to answer, a tokenizer. Out: episodes with the tokens of every turn, which
`episode_segments` turns into what a model can learn from.
"""

# ruff: noqa: ARG002 - a client's protocol brings more than is read here

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from selfplay.agent import Answer, Decision, Message, Player, Sampling
from selfplay.controller.anchors import NO_ANCHORS
from selfplay.environment import Environment, JuryQuestion
from selfplay.errors import ConfigError, UserError, suggestion
from selfplay.play import PolicyJury, play, sit_down
from selfplay.policy.rendering import ChatTokenizer, Renderer
from selfplay.registry import AGENTS, EnvironmentSpec, environment_source, find_entry, list_entries, make_environment
from selfplay.types import BASE, Episode, Limits, Match, Scalar, SeatAssignment, Span, derive_seed

NO_TEACHERS = tuple(kind for kind in NO_ANCHORS if kind != "api")
"""Who cannot move without a person or a served model; a model behind an API can show how to play."""


class Teacher(NamedTuple):
    """An agent kind whose moves are learnt, with its options."""

    kind: str
    options: Mapping[str, Scalar] = {}


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


def check_players(spec: EnvironmentSpec, params: Mapping[str, Scalar], teacher: Teacher, opponent: str) -> None:
    """Raises `UserError` for players that do not exist, cannot play alone, do not know the game, or have no such option."""
    for key, kind in (("player", teacher.kind), ("opponent", opponent)):
        if kind in NO_TEACHERS:
            known = [e.id for e in list_entries(AGENTS) if e.id not in NO_TEACHERS]
            raise ConfigError(
                f"warm_start.{key}: {kind!r} is not a player that can play alone{suggestion(kind, known)}"
            )
    environment = make_environment(spec.id, dict(params), 0)
    for player in (teacher, Teacher(opponent)) if opponent else (teacher,):
        find_entry(AGENTS, player.kind)
        _sit(spec, params, 0, dict.fromkeys(spec.seats, player), environment)
    environment.close()


def demonstrations(
    spec: EnvironmentSpec, params: Mapping[str, Scalar], *, teacher: Teacher, num: int, seed: int,
    chat: ChatTokenizer, opponent: str = "", options: Mapping[str, Mapping[str, Scalar]] | None = None,
) -> list[Episode]:  # fmt: skip
    """``num`` games of ``teacher`` at every seat, or at one seat after the other against ``opponent``; trained seats are the
    teacher's. ``options``: seat → those of the model player, as it is asked in play. Raises `UserError` when they cannot play."""
    against = Teacher(opponent) if opponent else None
    return asyncio.run(_games(spec, dict(params), (teacher, against), num, seed, chat, options or {}))


async def _games(
    spec: EnvironmentSpec, params: dict[str, Scalar], kinds: tuple[Teacher, Teacher | None], num: int, seed: int,
    chat: ChatTokenizer, options: Mapping[str, Mapping[str, Scalar]],
) -> list[Episode]:  # fmt: skip
    (teacher, opponent), episodes = kinds, []
    for index in range(num):
        shows = (spec.seats[index % len(spec.seats)],) if opponent is not None else spec.seats
        by = {s: teacher if opponent is None or s in shows else opponent for s in spec.seats}
        match = Match(
            index=index, env=spec.id, env_params=params, seed=derive_seed(seed, "demonstration", index),
            seats=tuple(
                SeatAssignment(seat=s, player="llm", agent=s, trained=True, options=dict(options.get(s, {})))
                if s in shows else _scripted(s, by[s])
                for s in spec.seats
            ),
            limits=Limits(max_turns=spec.max_turns),
        )  # fmt: skip
        episodes.append(await _game(spec, match, by, Dictation(chat)))
    if not any(turn.legal for e in episodes for turn in e.turns):
        raise UserError(
            f"player {teacher.kind!r} makes no legal move in {spec.id}: set warm_start.player to one that can"
        )
    return episodes


async def _game(spec: EnvironmentSpec, match: Match, by: Mapping[str, Teacher], dictation: Dictation) -> Episode:
    """``by``: seat → who chooses its moves."""
    environment = make_environment(match.env, match.env_params, match.seed)
    pupils = sit_down(match, dictation, Sampling(), environment)
    teachers = _sit(spec, match.env_params, match.seed, by, environment)
    players = {
        a.seat: Demonstrator(teachers[a.seat], pupils[a.seat], dictation) if a.trained else teachers[a.seat]
        for a in match.seats
    }
    return await play(
        match.env,
        environment,
        players,
        match,
        jury=PolicyJury(dictation, BASE),
        env_source=environment_source(match.env),
    )


def _sit(
    spec: EnvironmentSpec, params: Mapping[str, Scalar], seed: int, by: Mapping[str, Teacher], environment: Environment
) -> dict[str, Player]:
    """The scripted players; they ask no model."""
    seats = tuple(_scripted(s, by[s]) for s in spec.seats)
    match = Match(index=0, env=spec.id, env_params=dict(params), seed=seed, seats=seats)
    return sit_down(match, None, Sampling(), environment)


def _scripted(seat: str, player: Teacher) -> SeatAssignment:
    return SeatAssignment(seat=seat, player=player.kind, agent=player.kind, options=dict(player.options))


def _end_of_turn(chat: ChatTokenizer) -> int:
    """The stop token that the template itself writes after an answer; another one where it writes none."""
    dialogue = [Message("user", "?"), Message("assistant", "!")]
    written = chat.encode(chat.template(dialogue, add_generation_prompt=False))
    return next((token for token in reversed(written) if token in chat.stop_ids), chat.stop_ids[0])
