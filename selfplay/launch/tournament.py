"""Plays a tournament: the same pool and the same policy server as training, without a buffer and without a trainer.

    Scheduler ──Game──► pool workers ──generate──► one policy server with every player's adapter
        ▲                   │ episode
        └──── GameLog ◄─────┘   durable, then acknowledged

A game that infrastructure spoilt is played again as the next attempt and is never scored; one in which the environment raised is
listed as failed. Whatever stops the process, the next session goes on from the log.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import shutil
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from pathlib import Path

import msgspec

from selfplay.agent import Sampling
from selfplay.config import Config
from selfplay.errors import RunError, UserError, WorkerError
from selfplay.launch.entrants import adapters_of
from selfplay.launch.serve import Served, open_server
from selfplay.pool import EpisodeResult, FailedResult, PoolConfig, PoolSupervisor
from selfplay.process import RuntimeDir
from selfplay.store.atomic import store_errors
from selfplay.tournament.gamelog import GameLine, GameLog, line_of, read_lines
from selfplay.tournament.scheduler import Scheduler
from selfplay.tournament.spec import Game, TournamentSpec

POOL_GRACE_S = 5.0
MAX_FAILURES = 40
"""Failures in a row after which something is wrong with more than one game."""
RETRY_PAUSE_S = 0.05
WATCH_EVERY_S = 0.5
Watch = Callable[[GameLine, int, int], None]
"""Told of each finished game, with how many are done and how many there are to be."""
FindFault = Callable[[], RunError | None]
Enough = Callable[[dict[str, GameLine]], bool]
"""Whether to stop: asked after every game."""


class Played(msgspec.Struct, frozen=True, kw_only=True):
    """How a session of a tournament ended."""

    outcome: str
    """``finished``, ``decided``, ``budget: tokens`` or ``budget: time``."""
    num_games: int
    num_new: int
    replayed: dict[str, int]
    """Attempts that infrastructure spoilt, by reason; each was played again."""


async def play_tournament(
    spec: TournamentSpec,
    folder: Path,
    *,
    config: Config,
    say: Callable[[str], None],
    watch: Watch | None = None,
    enough: Enough | None = None,
) -> Played:
    """Play ``spec`` in ``folder`` from where its log stands to its end, its budget, or until ``enough``."""
    with _owned(folder):
        log = GameLog.open(folder, say)
        try:
            async with _site(spec, folder, config, say) as (pool, fault):
                return await _Session(spec, log, pool, fault, say, watch, enough).run()
        finally:
            log.close()


@contextlib.contextmanager
def _owned(folder: Path) -> Iterator[None]:
    """One process plays a tournament at a time."""
    with store_errors(folder):
        fd = os.open(folder / ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(fd)
        raise UserError(f"tournament {folder} is being played by another process: wait for it, or stop it") from None
    try:
        yield
    finally:
        os.close(fd)


@contextlib.asynccontextmanager
async def _site(
    spec: TournamentSpec, folder: Path, config: Config, say: Callable[[str], None]
) -> AsyncIterator[tuple[PoolSupervisor, FindFault]]:
    """A pool, and the policy server it asks when any player or the jury is a served model; and what tells of its death."""
    async with contextlib.AsyncExitStack() as stack:
        served: Served | None = None
        if spec.model:
            served = await stack.enter_async_context(open_server(config, adapters_of(spec.served), say))
        runtime = RuntimeDir.create()
        stack.callback(runtime.remove)
        pool = PoolSupervisor(_pool_config(spec, config, served), runtime=runtime, log_dir=folder / "logs", say=say)
        stack.push_async_callback(pool.close, POOL_GRACE_S)
        await pool.start()
        yield pool, served.children.fault if served is not None else lambda: None


def _pool_config(spec: TournamentSpec, config: Config, served: Served | None) -> PoolConfig:
    rollout = config.rollout
    return PoolConfig(
        workers=1, concurrency=spec.concurrency, max_restarts=rollout.max_restarts, jury=spec.jury,
        policy_endpoints=(served.endpoint,) if served is not None else (),
        sampling=Sampling(temperature=spec.temperature, max_tokens=spec.max_move_tokens),
        episode_timeout_s=spec.limits.time_s, request_timeout_s=rollout.request_timeout_s,
        needs_api_key=spec.jury.agent == "api" or any(p.player == "api" for p in spec.players),
    )  # fmt: skip


class _Session:
    """One process's part in a tournament."""

    def __init__(
        self,
        spec: TournamentSpec,
        log: GameLog,
        pool: PoolSupervisor,
        fault: FindFault,
        say: Callable[[str], None],
        watch: Watch | None,
        enough: Enough | None,
    ) -> None:
        self._spec, self._log, self._pool, self._say, self._watch = spec, log, pool, say, watch
        self._enough, self._fault = enough, fault
        self._mend()
        self._scheduler = Scheduler(spec, log.lines)
        self._flying: dict[int, tuple[Game, int]] = {}
        self._again: list[tuple[Game, int]] = []
        self._began, self._failures = time.monotonic(), 0
        self._tokens = sum(line.tokens for line in log.lines.values())
        self._num_before = len(log.lines)
        self._replayed: dict[str, int] = {}

    def _mend(self) -> None:
        """Lines for episodes whose writer was killed between the two."""
        by_index = {g.index: g for g in _all_games(self._spec, self._log)}
        for number, episode in self._log.unlisted():
            game = by_index.get(episode.match.index)
            if game is not None and game.id not in self._log.lines:
                self._log.add_lines([line_of(game, episode, number)])

    async def run(self) -> Played:
        outcome = ""
        while not outcome:
            while self._pool.num_free and (started := self._start_next()) is not None:
                await self._pool.submit(self._spec.match(*started))
            if not self._flying:
                outcome = "finished"
                break
            results = [await self._next_result(), *self._pool.ready_results(64)]
            await self._record([r for r in results if isinstance(r, EpisodeResult)])
            for failure in (r for r in results if isinstance(r, FailedResult)):
                await self._take_failure(failure)
            outcome = self._why_stop()
        return Played(
            outcome=outcome, num_games=len(self._log.lines), num_new=len(self._log.lines) - self._num_before,
            replayed=self._replayed,
        )  # fmt: skip

    async def _next_result(self) -> EpisodeResult | FailedResult:
        """The next result, or the death of the policy server."""
        waiting = asyncio.ensure_future(self._pool.next_result())
        try:
            while True:
                await asyncio.wait({waiting}, timeout=WATCH_EVERY_S)
                if waiting.done():
                    return waiting.result()
                if (fault := self._fault()) is not None:
                    raise fault
        finally:
            waiting.cancel()

    def _start_next(self) -> tuple[Game, int] | None:
        if self._again:
            started = self._again.pop(0)
        else:
            game = self._scheduler.next()
            if game is None:
                return None
            started = (game, 0)
        self._flying[started[0].index] = started
        return started

    async def _record(self, results: list[EpisodeResult]) -> None:
        """Durable first, acknowledged after."""
        if not results:
            return
        self._failures = 0
        games = [(self._flying.pop(r.match.index)[0], r.episode, r.data) for r in results]
        for line in await asyncio.to_thread(self._log.add, games):
            self._tokens += line.tokens
            self._tell(line)
        for result in results:
            await self._pool.ack(result.match.episode_id)

    async def _take_failure(self, result: FailedResult) -> None:
        game, attempt = self._flying.pop(result.match.index)
        if result.kind in ("environment", "invalid"):
            self._say(f"game {game.id} failed: {result.message}")
            self._count_failure(result.message)
            (line,) = self._log.add_lines([_failed_line(self._spec, game, result)])
            self._tell(line)
        else:
            self._replayed[result.reason] = self._replayed.get(result.reason, 0) + 1
            self._count_failure(result.message)
            self._again.append((game, attempt + 1))
            await asyncio.sleep(RETRY_PAUSE_S)
        await self._pool.ack(result.match.episode_id)

    def _tell(self, line: GameLine) -> None:
        if self._watch is not None:
            self._watch(line, len(self._log.lines), self._scheduler.num_planned)

    def _count_failure(self, message: str) -> None:
        self._failures += 1
        if self._failures > MAX_FAILURES:
            raise WorkerError(f"{self._failures} games in a row failed; the last: {message}")

    def _why_stop(self) -> str:
        spec = self._spec
        if self._enough is not None and self._enough(self._log.lines):
            return "decided"
        if spec.budget_tokens and self._tokens >= spec.budget_tokens:
            return "budget: tokens"
        if spec.budget_time_s and time.monotonic() - self._began >= spec.budget_time_s:
            return "budget: time"
        return ""


def _failed_line(spec: TournamentSpec, game: Game, result: FailedResult) -> GameLine:
    return GameLine(
        game=game.id, cluster=game.cluster, table=game.table, pair=game.pair,
        seats=dict(zip(spec.seats, game.seating, strict=True)), seed=result.match.seed, ended="failed",
        reason=result.message[:500], attempt=result.match.attempt,
    )  # fmt: skip


def _all_games(spec: TournamentSpec, log: GameLog) -> Sequence[Game]:
    """Every game that could have been played so far; dynamic schedules may go to any table."""
    last = max((line.pair for line in log.lines.values()), default=0)
    most = spec.pairs if spec.schedule != "active" else max(last + 2, spec.pairs) + 1
    return [g for t in spec.tables() for k in range(most) for g in spec.table_games(t, k)]


@contextlib.contextmanager
def tournament_folder(path: Path, spec: TournamentSpec) -> Iterator[Path]:
    """`new_folder` for what is played inside. When that cannot be (`UserError`) it goes again, unless a game was played:
    whoever mends the command may use its name."""
    folder = new_folder(path, spec)
    try:
        yield folder
    except UserError:
        if not read_lines(folder):
            shutil.rmtree(folder)
        raise


def new_folder(path: Path, spec: TournamentSpec) -> Path:
    """Make a tournament's folder; raises `UserError` when there is one already."""
    try:
        path.mkdir(parents=True)
    except FileExistsError:
        raise UserError(f"{path} exists: choose another --out, or  selfplay tournament resume {path}") from None
    except OSError as e:
        raise UserError(f"cannot make {path}: {e.strerror}") from None
    spec.save(path)
    return path
