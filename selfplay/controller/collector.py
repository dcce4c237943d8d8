"""From the pool's results to the buffer: durable first, acknowledged after, and every attempt counted once.

next_result ─► sound? ─► room? ─► episode log (one fsync for all that wait) ─► ledger, buffer, scorers ─► ack
                 └► dropped, by reason      failures ─► ledger (failed or void, by reason) ─► ack
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from selfplay.controller.gate_stage import GateStage
from selfplay.controller.memory import Memory
from selfplay.controller.report import Observer, RateMeter
from selfplay.controller.scoring_stage import ScoringStage
from selfplay.controller.waits import Waits
from selfplay.errors import StalledError, WorkerError
from selfplay.league import LeagueRecords
from selfplay.pool import EpisodeResult, FailedResult, PoolSupervisor
from selfplay.scoring import why_unusable
from selfplay.store.episode_log import EpisodeLog
from selfplay.store.state import PendingMatch
from selfplay.types import Episode, Match

GROUP = 64
"""Most episodes that share one fsync."""
TOO_BIG = "over buffer.max_bytes"
CANCELLED = "cancelled at a new version"

Result = EpisodeResult | FailedResult


class Collector:
    """Takes results for as long as it runs.

    ``starved`` says whether the loop waits for episodes that cannot come when the buffer takes none; ``aside`` keeps a result
    that is of no training game.
    """

    def __init__(
        self,
        *,
        pool: PoolSupervisor,
        log: EpisodeLog,
        league: LeagueRecords,
        memory: Memory,
        observer: Observer,
        reward_range: tuple[float, float],
        batch: int,
        max_failures: int,
        waits: Waits,
        scoring: ScoringStage,
        starved: Callable[[], bool],
        gate: GateStage | None = None,
        aside: Callable[[Result], bool] = lambda _: False,
    ) -> None:
        self._pool, self._log, self._league, self._memory, self._observer = pool, log, league, memory, observer
        self._reward_range, self._batch, self._max_failures = reward_range, batch, max_failures
        self._waits, self._scoring, self._starved = waits, scoring, starved
        self._gate, self._aside = gate, aside
        self._failures_in_a_row = self._num_cancelled = 0
        self._last_loss = ""
        self._unrecorded: list[Episode] = []
        self.meter = RateMeter()

    async def run(self) -> None:
        """Collect until cancelled. Raises `WorkerError`, `StoreError` or `StalledError`."""
        while True:
            came = [await self._pool.next_result(), *self._pool.ready_results(GROUP - 1)]
            results = await self._without_gate([r for r in came if not await self._put_aside(r)])
            for result in results:
                if isinstance(result, FailedResult):
                    await self._record_failure(result)
            await self._store_all([r for r in results if isinstance(r, EpisodeResult)])
            await self._waits.notify()

    async def _without_gate(self, results: list[Result]) -> list[Result]:
        """The run's own results, after the gate has taken its own."""
        gate = self._gate
        games = [] if gate is None else [r for r in results if gate.owns(r.match)]
        if gate is None or not games:
            return results
        wrong = await gate.take(games)
        for game in games:
            await self._pool.ack(game.match.episode_id)
        for text in wrong:
            self._count_failure(text)
        if len(wrong) < len(games):
            self._failures_in_a_row = 0
        return [r for r in results if not gate.owns(r.match)]

    async def _put_aside(self, result: Result) -> bool:
        kept = self._aside(result)
        if kept:
            await self._pool.ack(result.match.episode_id)
        return kept

    async def record_games(self) -> None:
        """Into the league what came since the last call; after a kill it is read from the log again."""
        games, self._unrecorded = self._unrecorded, []
        await asyncio.to_thread(self._league.add, games)

    def take_cancelled(self) -> int:
        """Games that were given up at a new version since the last call."""
        num, self._num_cancelled = self._num_cancelled, 0
        return num

    async def _store_all(self, results: list[EpisodeResult]) -> None:
        """In groups as large as the buffer has room for; a full buffer holds the workers back."""
        waiting = [r for r in results if not await self._dropped(r)]
        while waiting:
            await self._waits.until(
                f"room in the buffer for {len(waiting)} episodes",
                lambda: self._has_room(waiting[0]) or self._starved(),
            )
            group = self._fitting(waiting)
            if not group:
                raise StalledError(self._memory.buffer.why_stuck(self._batch, 1) or "the buffer takes no episode")
            await self._store(group)
            del waiting[: len(group)]

    async def _store(self, group: list[EpisodeResult]) -> None:
        seqs = await asyncio.to_thread(self._log.append_many, [r.data for r in group])
        for seq, result in zip(seqs, group, strict=True):
            self._end_flight(result.match)
            self._memory.ledger.store(result.match.episode_id)
            self._memory.buffer.put(seq, result.data, result.episode, ready=self._scoring.is_empty)
            if not self._scoring.is_empty:
                self._scoring.submit(seq, result.episode)
            self._unrecorded.append(result.episode)
            num_sampled = result.episode.num_tokens()[1]
            self.meter.add(num_sampled)
            self._memory.generated.add(num_sampled)
            await self._pool.ack(result.match.episode_id)
        self._failures_in_a_row = 0
        await self._waits.notify()

    def _has_room(self, result: EpisodeResult) -> bool:
        return self._memory.buffer.has_room(len(result.data))

    def _fitting(self, waiting: list[EpisodeResult]) -> list[EpisodeResult]:
        """The longest beginning of ``waiting`` that the buffer takes as it is now."""
        group, num_bytes, buffer = list[EpisodeResult](), 0, self._memory.buffer
        for result in waiting:
            num_bytes += len(result.data)
            if len(buffer) + len(group) >= buffer.max_episodes or buffer.num_bytes + num_bytes > buffer.max_bytes:
                break
            group.append(result)
        return group

    async def _dropped(self, result: EpisodeResult) -> bool:
        """Whether the episode is not fit to be stored; it is counted and said."""
        unusable = why_unusable(result.episode, self._reward_range)
        reason, detail = (unusable.reason, unusable.detail) if unusable else ("", "")
        if not reason and len(result.data) > self._memory.buffer.max_bytes:
            reason, detail = TOO_BIG, f"{len(result.data)} bytes, at most {self._memory.buffer.max_bytes} fit"
        if reason:
            self._end_flight(result.match)
            self._memory.ledger.drop(result.match.episode_id, reason)
            await self._pool.ack(result.match.episode_id)
            self._count_failure(f"episode {result.match.episode_id} dropped, {reason}: {detail}")
        return bool(reason)

    async def _record_failure(self, result: FailedResult) -> None:
        memory, match = self._memory, result.match
        self._end_flight(match)
        if result.kind == "cancelled":
            memory.ledger.drop(match.episode_id, CANCELLED)
            self._num_cancelled += 1
            memory.replays.append(PendingMatch(match.index, match.attempt + 1))
            await self._pool.ack(match.episode_id)
            return
        if result.kind == "infrastructure":
            memory.ledger.void(match.episode_id, result.reason)
            memory.replays.append(PendingMatch(match.index, match.attempt + 1))
        else:
            memory.ledger.fail(match.episode_id, result.reason)
        await self._pool.ack(match.episode_id)
        if result.holder_lost:  # what becomes of workers and pools is bounded where they are watched
            if result.message != self._last_loss:
                self._observer.event(f"episodes are played again, {match.episode_id} first: {result.message}")
            self._last_loss = result.message
            return
        self._count_failure(f"episode {match.episode_id} {result.kind} failure: {result.message}", result.traceback)

    def _count_failure(self, text: str, traceback: str = "") -> None:
        self._failures_in_a_row += 1
        self._observer.event(text)
        if self._failures_in_a_row > self._max_failures:
            raise WorkerError(
                f"{self._failures_in_a_row} episodes in a row failed (rollout.max_failures={self._max_failures}); the last: "
                f"{text}" + (f"\n{traceback}" if traceback else "")
            )

    def _end_flight(self, match: Match) -> None:
        self._memory.began_with.pop(PendingMatch(match.index, match.attempt), None)
