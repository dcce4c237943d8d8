"""The controller's side of an environment pool: gives out matches, brings back results, keeps the workers alive.

    controller ── submit(match) ──►  PoolSupervisor  ── PlayMatch ──►  worker process × N
               ◄─ next_result() ───       │ ▲        ◄─ EpisodeDone ──     (resent until acknowledged)
               ── ack(episode) ───►       │ └─────── checked at ingress
                                          └─ watches: exit codes, boards, overdue leases; restarts within a budget

A worker is dead when its process has ended, and stuck when its board has not moved for longer than an episode may take;
being slow to answer is neither. What a dead worker held is void: returned as ``infrastructure`` failures, to be played
again under the next attempt. The episode that held up a stuck worker is an ``environment`` failure: it would again.

Pools of other processes and hosts are guests (`selfplay.pool.gateway`): they get matches like workers, but nothing they say
can be worse than void.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import zmq

from selfplay.errors import RunError, WireError, WorkerError
from selfplay.pool.config import PoolConfig
from selfplay.pool.leases import Leases
from selfplay.pool.results import (
    POOL_LEFT,
    WORKER_LOST,
    EpisodeResult,
    Held,
    Result,
    checked_result,
    place,
    stuck_result,
    void_result,
)
from selfplay.pool.tally import Tally
from selfplay.pool.workers import Guest, Launch, WorkerHandle, launch_local, stack_of
from selfplay.process import RuntimeDir
from selfplay.types import Match
from selfplay.wire.codec import Codec
from selfplay.wire.messages import (
    PROTOCOL,
    CancelMatch,
    ControllerMessage,
    EpisodeAck,
    EpisodeDone,
    EpisodeFailed,
    PlayMatch,
    WorkerHello,
    WorkerMessage,
)
from selfplay.wire.sockets import bind_router, receive, route

WATCH_EVERY_S = 0.1
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.1, 5.0


class PoolSupervisor:
    """One pool of environment workers.

    >>> pool = PoolSupervisor(config, runtime=runtime, log_dir=run / "logs", say=print)
    >>> await pool.start()
    >>> await pool.submit(match)
    >>> result = await pool.next_result()      # EpisodeResult | FailedResult
    >>> await pool.ack(result.match.episode_id)     # once it is durable
    >>> await pool.close(grace_s=5.0)
    """

    def __init__(
        self,
        config: PoolConfig,
        *,
        runtime: RuntimeDir,
        log_dir: Path,
        say: Callable[[str], None],
        launch: Launch = launch_local,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._config, self._runtime, self._log_dir = config, runtime, log_dir
        self._launch, self._now, self._say = launch, monotonic, say
        self._leases = Leases()
        self._workers: dict[bytes, WorkerHandle] = {}
        self._guests: dict[str, Guest] = {}
        self._restart_at: dict[int, float] = {}
        self._early_deaths = 0
        self._results: asyncio.Queue[Result | None] = asyncio.Queue()
        self._changed = asyncio.Event()
        self._error: RunError | None = None
        self._context: zmq.Context[Any] | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._incoming: Codec[WorkerMessage] = Codec(WorkerMessage)
        self._outgoing: Codec[ControllerMessage] = Codec(ControllerMessage)
        self.num_restarts = 0
        self._tally = Tally(monotonic)

    # ── what the controller calls ─────────────────────────────────────────────────────────────

    async def start(self) -> None:
        """Start every worker and wait until each has said hello; raises `WorkerError` when they keep dying."""
        self._context = zmq.Context()
        self._endpoint = self._runtime.endpoint("pool.sock")
        self._socket = bind_router(self._context, self._endpoint)
        for slot in range(self._config.workers):
            self._start_worker(slot)
        for loop in (self._receive, self._watch):
            task = asyncio.create_task(loop(), name=f"pool {loop.__name__}")
            task.add_done_callback(self._task_ended)
            self._tasks.append(task)
        await self._until(lambda: self.num_ready == self._config.workers)

    @property
    def num_ready(self) -> int:
        """Workers that have said hello and live."""
        return sum(w.ready for w in self._workers.values())

    @property
    def num_free(self) -> int:
        """Episode slots of live workers and guests without a match."""
        return sum(self._free_slots(w) for w in self._holders())

    @property
    def in_flight(self) -> list[Held]:
        """Who holds what, the oldest first."""
        return self._leases.held(self._now())

    @property
    def pids(self) -> dict[str, int]:
        """Live workers by name, with their process ids."""
        return {w.name: w.process.pid for w in self._workers.values()}

    @property
    def counts(self) -> dict[str, int]:
        """Counters: granted, delivered, void, duplicate, late, bad_frames, unknown_sender, restarts, ..."""
        return {**self._leases.counts, "restarts": self.num_restarts}

    def who_played(self) -> dict[str, float]:
        """What the run's workers and remote pools brought since the last call; see `Tally.taken`."""
        return self._tally.taken(list(self._workers.values()), list(self._guests.values()))

    async def submit(self, match: Match) -> None:
        """Give a match to the least busy worker, waiting for a free slot; raises `WorkerError` when the pool is lost."""
        data = self._outgoing.encode(PlayMatch(match=match))
        while True:
            await self._until(lambda: self.num_free > 0)
            worker = max(self._holders(), key=self._free_slots)
            self._leases.grant(match, worker.name, self._now())
            if (
                await route(self._socket, worker.identity, data)
                if isinstance(worker, WorkerHandle)
                else worker.give(match)
            ):
                return
            # It went away under our hands: its end is noticed by its watch, the match goes to another.
            worker.ready = False
            self._leases.void(match.episode_id)

    async def cancel(self, episode_id: str) -> None:
        """Ask for an attempt to be given up; it comes back as a ``cancelled`` failure unless it was done already."""
        lease = self._leases.find(episode_id)
        if lease is not None:
            await self._send(lease.worker, CancelMatch(episode_id=episode_id))

    async def next_result(self) -> Result:
        """The next result; raises `WorkerError` when the restart budget is spent and all results are handed out."""
        if self._error is not None and self._results.empty():
            raise self._error
        result = await self._results.get()
        if result is None:
            self._results.put_nowait(None)
            raise self._error or RunError("the environment pool was closed")
        return result

    def ready_results(self, limit: int) -> list[Result]:
        """Up to ``limit`` further results that need no waiting."""
        ready: list[Result] = []
        while len(ready) < limit and not self._results.empty():
            result = self._results.get_nowait()
            if result is None:
                self._results.put_nowait(None)
                break
            ready.append(result)
        return ready

    async def ack(self, episode_id: str) -> None:
        """The result of this attempt is durable: its worker may forget it."""
        worker = self._leases.ack(episode_id)
        if worker is not None:
            await self._send(worker, EpisodeAck(episode_id=episode_id))

    async def close(self, grace_s: float) -> None:
        """Stop the workers (they cancel what they play) and release everything; kills after ``grace_s``."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for worker in self._workers.values():
            worker.process.signal(signal.SIGTERM)
        deadline = time.monotonic() + grace_s
        while time.monotonic() < deadline and any(w.process.exit_code() is None for w in self._workers.values()):
            await asyncio.sleep(0.02)
        for worker in self._workers.values():
            worker.end()
        self._workers.clear()
        if self._context is not None:
            self._socket.close()
            self._context.term()
            self._context = None
        self._results.put_nowait(None)

    # ── guests ────────────────────────────────────────────────────────────────────────────────

    def join(self, guest: Guest) -> None:
        """From now on ``guest`` gets matches too."""
        self._guests[guest.name] = guest
        self._notify()

    def leave(self, guest: Guest, how: str) -> int:
        """``guest`` is gone; what it held is void. How many matches that were."""
        del self._guests[guest.name]
        leases = self._leases.of(guest.name)
        for lease in leases:
            self._leases.void(lease.match.episode_id)
            self._hand_out(void_result(lease, POOL_LEFT, how))
        self._notify()
        return len(leases)

    def slots_changed(self) -> None:
        """A guest takes more or fewer matches than before."""
        self._notify()

    # ── messages from workers ─────────────────────────────────────────────────────────────────

    async def _receive(self) -> None:
        while True:
            identity, data = await receive(self._socket) or (b"", b"")
            worker = self._workers.get(identity)
            if worker is None:
                self._leases.counts["unknown_sender"] += 1
                continue
            try:
                message = self._incoming.decode(data)
            except WireError:
                self._leases.counts["bad_frames"] += 1
                continue
            if isinstance(message, WorkerHello):
                self._welcome(worker, message)
            else:
                await self.take_result(worker, message)

    def _welcome(self, worker: WorkerHandle, hello: WorkerHello) -> None:
        if hello.protocol != PROTOCOL:
            self._fail(WorkerError(f"{worker.name} speaks protocol {hello.protocol}, this controller {PROTOCOL}"))
        elif hello.worker == worker.name and hello.pid == worker.process.pid:
            worker.ready = True
            self._notify()
        else:
            self._leases.counts["bad_frames"] += 1

    async def take_result(self, worker: WorkerHandle | Guest, message: EpisodeDone | EpisodeFailed) -> None:
        """What a worker or guest says came of a match that it holds."""
        standing = self._leases.standing(message.episode_id, worker.name)
        if standing == "held":
            lease = self._leases.deliver(message.episode_id)
            result = checked_result(lease, message)
            result = result if isinstance(worker, WorkerHandle) else worker.judged(result)
            if isinstance(result, EpisodeResult):
                self._tally.count(worker)
            self._hand_out(result)
        elif standing == "delivered":
            # Sent again before the controller had it durable: the acknowledgement will follow.
            self._leases.counts["duplicate"] += 1
        else:
            # An acknowledgement that got lost, or a result nobody waits for: the worker shall forget it.
            self._leases.counts["duplicate" if standing == "acked" else "late"] += 1
            await self._send(worker.name, EpisodeAck(episode_id=message.episode_id))

    def _hand_out(self, result: Result) -> None:
        self._leases.counts["delivered" if isinstance(result, EpisodeResult) else f"failed_{result.kind}"] += 1
        self._results.put_nowait(result)
        self._notify()

    # ── watching ──────────────────────────────────────────────────────────────────────────────

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(WATCH_EVERY_S)
            for worker in list(self._workers.values()):
                if worker.process.exit_code() is not None:
                    await self._bury(worker)
                elif (stuck_s := worker.stuck_for(self._now())) is not None:
                    await self._end_stuck(worker, worker.pulse().running, stuck_s)
            slack_s = self._config.request_timeout_s + self._config.stuck_after_s
            for lease in self._leases.overdue(self._now(), slack_s):
                if (holder := self._workers.get(lease.worker.encode())) is not None:
                    await self._end_stuck(holder, lease.match.episode_id, self._now() - lease.since)
                elif (guest := self._guests.get(lease.worker)) is not None:
                    guest.expel(f"{place(lease.match)} did not end in {self._now() - lease.since:.0f} s")
            for slot, at in list(self._restart_at.items()):
                if self._now() >= at:
                    del self._restart_at[slot]
                    self._start_worker(slot)

    async def _bury(self, worker: WorkerHandle) -> None:
        """The process has ended by itself: what it held is void."""
        await asyncio.sleep(WATCH_EVERY_S)  # results it sent before its end are still on their way in
        running = self._leases.find(worker.pulse().running or "")
        where = f" while it played {place(running.match)}" if running is not None else ""
        self._lose(worker, f"environment worker{where}: {worker.process.describe_exit()}", culprit=None)

    async def _end_stuck(self, worker: WorkerHandle, culprit: str | None, stuck_s: float) -> None:
        """Its loop does not move, or an episode does not end: show where, kill it, blame that episode only."""
        stack = await stack_of(worker)
        worker.process.kill()
        what = "did not start" if not worker.ready else "did not move"
        self._lose(
            worker, f"environment worker {worker.name} {what} for {stuck_s:.1f} s and was killed", culprit, stack
        )

    def _lose(self, worker: WorkerHandle, how: str, culprit: str | None, stack: str = "") -> None:
        del self._workers[worker.identity]
        if not self._leases.of(worker.name):  # else every episode that is lost says it
            self._say(how)
        for lease in self._leases.of(worker.name):
            self._leases.void(lease.match.episode_id)
            stuck = lease.match.episode_id == culprit
            self._hand_out(stuck_result(lease, how, stack) if stuck else void_result(lease, WORKER_LOST, how))
        worker.end()
        self._restart_or_fail(worker, how)

    def _restart_or_fail(self, worker: WorkerHandle, how: str) -> None:
        allowed = self._config.max_restarts
        if self.num_restarts >= allowed:
            self._fail(
                WorkerError(
                    f"environment workers died {allowed + 1} times (rollout.max_restarts={allowed}); the last: {how}"
                )
            )
            return
        self.num_restarts += 1
        self._early_deaths = 0 if worker.ready else self._early_deaths + 1
        pause_s = min(_FIRST_PAUSE_S * 2**self._early_deaths, _LONGEST_PAUSE_S)
        self._restart_at[worker.slot] = self._now() + pause_s

    # ── small parts ───────────────────────────────────────────────────────────────────────────

    def _start_worker(self, slot: int) -> None:
        worker = WorkerHandle(
            slot, self._config, controller=self._endpoint, runtime=self._runtime,
            log=self._log_dir / f"env-{slot}.log", launch=self._launch, now=self._now(),
        )  # fmt: skip
        self._workers[worker.identity] = worker

    def _holders(self) -> list[WorkerHandle | Guest]:
        return [*self._workers.values(), *self._guests.values()]

    def _free_slots(self, worker: WorkerHandle | Guest) -> int:
        return max(0, worker.slots - self._leases.num_held(worker.name)) if worker.ready else 0

    async def _send(self, worker: str, message: ControllerMessage) -> None:
        """Best effort: a worker that is gone needs nothing, one that is behind sends its result again."""
        guest = self._guests.get(worker)
        if guest is not None:
            sent = guest.tell(message)
        else:
            sent = worker.encode() in self._workers and await route(
                self._socket, worker.encode(), self._outgoing.encode(message)
            )
        if not sent:
            self._leases.counts["undelivered"] += 1

    async def _until(self, ready: Callable[[], bool]) -> None:
        while not ready():
            if self._error is not None:
                raise self._error
            self._changed.clear()
            await self._changed.wait()
        if self._error is not None:
            raise self._error

    def _notify(self) -> None:
        self._changed.set()

    def _fail(self, error: RunError) -> None:
        if self._error is None:
            self._error = error
            self._results.put_nowait(None)
            self._notify()

    def _task_ended(self, task: asyncio.Task[Any]) -> None:
        """Neither loop ends by itself; an error in one must reach whoever waits for results."""
        with contextlib.suppress(asyncio.CancelledError):
            error = task.exception()
            if error is not None:
                self._fail(WorkerError(f"{task.get_name()} failed: {type(error).__name__}: {error}"))
