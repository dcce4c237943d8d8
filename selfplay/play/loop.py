"""The loop of one game.

    Table ──decisions──► players (all seats of a round at once) ──answers──► Table.parse ──moves──► Table.step
      └── game over ──► jury ──► outcome ──► Episode

How it can end: *natural* (the game says so), *forfeit* (a seat made no legal move in its tries), *truncated* (a cap on
turns, tokens or time, or a context that is full). A game that is over when a cap is reached has ended naturally.
Everything else raises: `EnvironmentFault` for the game's own bug, `EngineError` when a model gave no answer; neither is
ever a result. Players and the game are closed however it ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any, TypeVar

import msgspec

from selfplay.agent import Answer, Decision, Player
from selfplay.environment import Environment, JuryQuestion
from selfplay.errors import EngineError, EnvironmentFault, IllegalMove, UserError
from selfplay.play.jury import Jury
from selfplay.play.table import Table
from selfplay.play.text import clean
from selfplay.types import Ended, Episode, JuryRecord, Match, Scalar, Turn
from selfplay.types.episode import MAX_TEXT

T = TypeVar("T")
MAX_NOTE = 2000
_YIELD_EVERY_S = 0.01
"""Players that answer without waiting must still let other episodes of the process run."""


Watch = Callable[[Decision, Turn], None]
"""Told of a seat's decision as it was first put, and of one try of it."""


class _End(msgspec.Struct, frozen=True, kw_only=True):
    """How a game ended, before the result is known."""

    ended: Ended
    reason: str = ""
    offenders: tuple[str, ...] = ()


async def play(
    env_id: str,
    environment: Environment,
    players: Mapping[str, Player],
    match: Match,
    *,
    jury: Jury | None = None,
    env_source: str,
    watch: Watch | None = None,
) -> Episode:
    """Play ``environment`` to its end and return the whole episode.

    ``watch`` is called for every turn, in seat order, once all seats of its round have answered.
    Raises `UserError` when seats do not fit or a jury is missing, `EnvironmentFault`, and whatever a player raises.
    """
    game = _Game(env_id, environment, players, match, jury, watch)
    try:
        episode = await game.play(env_source)
    except BaseException:
        # The first error is the one to be seen; what cannot even be closed adds nothing to it.
        with contextlib.suppress(EnvironmentFault):
            game.close()
        await _close_all(players)
        raise
    failures = await _close_all(players)
    game.close()
    for failure in failures:
        raise failure
    return episode


class _Game:
    """One episode while it is played."""

    def __init__(
        self,
        env_id: str,
        environment: Environment,
        players: Mapping[str, Player],
        match: Match,
        jury: Jury | None,
        watch: Watch | None,
    ) -> None:
        self._env_id, self._match, self._players, self._jury = env_id, match, players, jury
        self._watch = watch
        self._table = Table(env_id, environment, match.seed)
        self._agents = {a.seat: a.agent for a in match.seats}
        self._turns: list[Turn] = []
        self._num_tokens = 0
        self._yielded_at = 0.0

    def close(self) -> None:
        self._table.close()

    async def play(self, env_source: str) -> Episode:
        _check_seats(self._table.seats, self._players, self._match)
        begun = self._yielded_at = time.perf_counter()
        end = await self._until_over()
        records: tuple[JuryRecord, ...] = ()
        rewards, reason = dict.fromkeys(self._table.seats, 0.0), end.reason
        winners: tuple[str, ...] = ()
        info: dict[str, Scalar] = {}
        if end.ended == "natural":
            records = await self._hear_jury()
            outcome = self._table.outcome()
            rewards, winners, reason, info = outcome.rewards, outcome.winners, outcome.reason, outcome.info
        elif end.ended == "forfeit":
            rewards = self._table.forfeit_rewards(end.offenders)
            winners = tuple(s for s in self._table.seats if s not in end.offenders)
        if self._table.num_printed_chars:
            info = info | {"printed_chars": self._table.num_printed_chars}
        return Episode(
            match=self._match, env_source=env_source, turns=tuple(self._turns), rewards=rewards, winners=winners,
            ended=end.ended, reason=reason, offender=end.offenders[0] if end.offenders else None,
            jury=records, info=info, duration_s=time.perf_counter() - begun,
        )  # fmt: skip

    async def _until_over(self) -> _End:
        limit = self._match.limits.time_s
        try:
            async with asyncio.timeout(limit) as timer:
                return await self._rounds()
        except TimeoutError:
            if not timer.expired():  # a player's own timeout, not ours
                raise
            return _End(ended="truncated", reason=f"time: the cap of {limit:g} s was reached")

    async def _rounds(self) -> _End:
        num_decisions = 0
        decisions = self._table.open_round()
        while decisions:
            num_decisions += len(decisions)
            if cap := self._cap_reached(num_decisions):
                return _End(ended="truncated", reason=cap)
            if time.perf_counter() - self._yielded_at > _YIELD_EVERY_S:
                await asyncio.sleep(0)
                self._yielded_at = time.perf_counter()
            moves, end = await self._play_round(decisions)
            if end is not None:
                return end
            decisions = self._table.open_round(moves)
        return _End(ended="natural")

    def _cap_reached(self, num_decisions: int) -> str:
        limits = self._match.limits
        if num_decisions > limits.max_turns:
            return f"turns: the cap of {limits.max_turns} was reached"
        if self._num_tokens >= limits.max_tokens:
            return f"tokens: {self._num_tokens} were used, the cap is {limits.max_tokens}"
        return ""

    async def _play_round(self, decisions: Sequence[Decision]) -> tuple[dict[str, str], _End | None]:
        """Ask all seats of the round; no seat is shown anything of this round. (moves, how it ended if it did)."""
        tries: list[list[Turn]] = [[] for _ in decisions]
        try:
            if len(decisions) == 1:
                await self._ask(decisions[0], tries[0])
            else:
                await _together([self._ask(d, t) for d, t in zip(decisions, tries, strict=True)])
        finally:
            self._record(decisions, tries)
        moves = {}
        for turns in tries:
            last = turns[-1]
            if last.move is None:
                return {}, _round_end(tries)
            moves[last.seat] = last.move
        return moves, None

    def _record(self, decisions: Sequence[Decision], tries: Sequence[Sequence[Turn]]) -> None:
        """Keep the turns of a round in seat order, whoever was quicker."""
        for turns in tries:
            self._turns += turns
        if self._watch is not None:
            for decision, turns in zip(decisions, tries, strict=True):
                for turn in turns:
                    self._watch(decision, turn)

    async def _ask(self, decision: Decision, tries: list[Turn]) -> None:
        """Ask one seat until its move is legal, its tries are used up, or its context is full."""
        decide = self._players[decision.seat].decide
        while True:
            begun = time.perf_counter()
            answer = await decide(decision)
            turn = self._turn(decision, answer, time.perf_counter() - begun)
            tries.append(turn)
            self._num_tokens += len(answer.prompt_ids) + len(answer.sampled_ids)
            if turn.move is not None or turn.stop_reason == "context" or len(tries) > self._table.forfeit[0]:
                return
            decision = msgspec.structs.replace(decision, complaint=turn.note)

    def _turn(self, decision: Decision, answer: Answer, latency_s: float) -> Turn:
        if answer.stop_reason == "abort":
            raise EngineError(f"the answer of seat {decision.seat} in episode {self._match.episode_id} was aborted")
        text, move, note = clean(answer.text), None, ""
        try:
            if len(text) > MAX_TEXT:
                raise IllegalMove(f"the answer has {len(text)} characters, at most {MAX_TEXT} are read")
            move = self._table.parse(decision.seat, text)
        except IllegalMove as e:
            note = _note(answer, str(e))
        return Turn(
            seat=decision.seat, agent=self._agents[decision.seat], round=decision.round,
            prompt_ids=answer.prompt_ids, fork=answer.fork, sampled_ids=answer.sampled_ids, logprobs=answer.logprobs,
            spans=answer.spans, kept=answer.kept, stop_reason=answer.stop_reason, text=text[:MAX_TEXT], move=move, note=note,
            latency_s=latency_s,
        )  # fmt: skip

    async def _hear_jury(self) -> tuple[JuryRecord, ...]:
        questions = self._table.jury_questions()
        if not questions:
            return ()
        jury = self._jury
        if jury is None:
            raise UserError(f"{self._env_id} needs a jury to decide its games, and none was given")
        answers = await _together([jury.judge(q) for q in questions])
        records = tuple(_record(q, a, jury.name) for q, a in zip(questions, answers, strict=True))
        self._table.hear_jury([dict(zip(r.labels, r.probabilities, strict=True)) for r in records])
        return records


def _check_seats(seats: Sequence[str], players: Mapping[str, Player], match: Match) -> None:
    assigned = [a.seat for a in match.seats]
    if sorted(assigned) != sorted(seats) or set(players) != set(seats):
        raise UserError(f"{match.env} has the seats {', '.join(seats)}, but the match fills {', '.join(assigned)}")


def _round_end(tries: Sequence[Sequence[Turn]]) -> _End:
    """How the game ends when at least one seat of a round has no legal move."""
    failed = [(t[-1], len(t)) for t in tries if t[-1].move is None]
    if full := [t.seat for t, _ in failed if t.stop_reason == "context"]:
        return _End(ended="truncated", reason=f"context: seat {', '.join(full)} reached the model's context length")
    reasons = [f"{t.seat} made no legal move in {n} tries: {t.note}" for t, n in failed]
    return _End(ended="forfeit", reason="; ".join(reasons), offenders=tuple(t.seat for t, _ in failed))


def _note(answer: Answer, complaint: str) -> str:
    """The complaint; an answer cut at its token budget is told as that, not as a bad answer."""
    if answer.stop_reason == "length":
        at = f"{len(answer.sampled_ids)} tokens" if answer.sampled_ids else "its token budget"
        complaint = f"the answer was cut at {at}: {complaint}"
    complaint = clean(complaint) or "not a legal move"
    return complaint if len(complaint) <= MAX_NOTE else complaint[: MAX_NOTE - 1] + "…"


def _record(question: JuryQuestion, answer: Mapping[str, float], juror: str) -> JuryRecord:
    """The jury's answer, checked: one finite non-negative mass per label, scaled to sum to exactly one."""
    masses = [float(answer.get(label, math.nan)) for label in question.labels]
    total = sum(masses)
    if not all(math.isfinite(m) and m >= 0.0 for m in masses) or not total > 0.0:
        raise EngineError(f"jury {juror} answered {dict(answer)!r} to a question with labels {question.labels!r}")
    return JuryRecord(
        question=question.prompt, labels=question.labels, probabilities=tuple(m / total for m in masses), juror=juror
    )


async def _together(calls: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    """Results of all calls, in order. The first error cancels the others, waits for them to be gone, and is raised."""
    tasks = [asyncio.ensure_future(call) for call in calls]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)


async def _close_all(players: Mapping[str, Player]) -> list[Exception]:
    """Close every player, each whatever the others do; what they raised."""
    failures = []
    for player in players.values():
        try:
            await player.close()
        except Exception as e:  # noqa: BLE001 - a boundary to agents' code: every player must get its close
            failures.append(e)
    return failures
