"""A pool that plays for a run of another process or host: the other end of `selfplay.pool.gateway`.

    run ── PlayMatch, CancelMatch, EpisodeAck ──►  JoinedPool ── submit, cancel, ack ──►  PoolSupervisor ──► workers
        ◄─ EpisodeDone, EpisodeFailed, AskPolicy ─     │ ▲                                                     │
                                                       └─┴──────────────── PolicyRelay ◄── Generate, Choose ──┘

The workers are the same as in a run, watched by the same supervisor; only where matches come from differs. The pool plays
the one environment it was started for, whatever it is sent, and ends when the run is over, silent, or wants it no more.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import zmq

from selfplay.config.schema import JuryConfig
from selfplay.errors import EngineError, RunError, UserError, WireError
from selfplay.pool.config import PoolConfig
from selfplay.pool.outbox import Outbox
from selfplay.pool.relay import PolicyRelay
from selfplay.pool.results import FailedResult, Result
from selfplay.pool.supervisor import PoolSupervisor
from selfplay.process import RuntimeDir
from selfplay.registry import EnvironmentSpec
from selfplay.registry.ids import may_be_one_game, shown_id
from selfplay.types import Match
from selfplay.wire.codec import Codec, encode
from selfplay.wire.curve import KeyedConnection, KeyPair
from selfplay.wire.messages import (
    PROTOCOL,
    CancelMatch,
    EpisodeAck,
    EpisodeDone,
    EpisodeFailed,
    FromPool,
    PlayMatch,
    PolicyAnswer,
    PoolHello,
    PoolLeaves,
    PoolPulse,
    PoolRefused,
    PoolWelcome,
    RunEnds,
    Terms,
    ToPool,
)
from selfplay.wire.sockets import receive, unique_identity

PULSE_S = 0.5
_LOOK_S = 0.05
_GRACE_S = 2.0
_REPORT_EVERY_S = 10.0


class JoinConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Which run to play for, and with what."""

    connect: str
    keys: KeyPair
    server: bytes
    """Public key of the run."""
    spec: EnvironmentSpec
    workers: int
    concurrency: int
    wait_s: float
    """Longest to wait for the run's welcome."""
    log_dir: Path


class PoolSummary(msgspec.Struct, frozen=True, kw_only=True):
    """What came of it."""

    name: str
    played: int
    failed: int
    ended: str
    """Why the pool left."""


class JoinedPool:
    """One pool from its hello to its end.

    >>> pool = JoinedPool(config, runtime, say=print)
    >>> summary = await pool.run()       # `pool.leave()` from a signal handler ends it
    """

    def __init__(self, config: JoinConfig, runtime: RuntimeDir, say: Callable[[str], None]) -> None:
        self._config, self._runtime, self._say = config, runtime, say
        self._in, self._out = Codec[Any](ToPool), Codec[Any](FromPool)
        self._context: zmq.Context[Any] = zmq.Context()
        self._matches: dict[str, Match] = {}
        """As they were sent, until their results are acknowledged."""
        self._heard_at = time.monotonic()
        self._ended: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._draining = False
        self._num_played = self._num_failed = 0

    def leave(self) -> None:
        """Take no more matches, finish what is being played, then leave; a second call leaves at once."""
        if self._draining:
            self._end("it was told to leave")
        self._draining = True

    async def run(self) -> PoolSummary:
        """Play until the run is over or wants no more of this pool, or until told to leave.

        Raises `UserError` when the run cannot be joined, `RunError` when it falls silent or sends the pool away.
        """
        config = self._config
        self._link = KeyedConnection(self._context, config.connect, unique_identity("pool"), config.keys, config.server)
        try:
            welcome = await self._join()
            return await self._play(welcome)
        finally:
            self._link.close()
            self._context.term()

    # ── joining ───────────────────────────────────────────────────────────────────────────────

    async def _join(self) -> PoolWelcome:
        config, deadline = self._config, time.monotonic() + self._config.wait_s
        hello = PoolHello(
            protocol=PROTOCOL, env=shown_id(config.spec.id), source=config.spec.source, slots=config.workers * config.concurrency
        )  # fmt: skip
        self._offer(hello)
        while time.monotonic() < deadline:
            frames = await receive(self._link.socket, _LOOK_S)
            if frames is None:
                self._link.look()
                if self._link.refused:
                    raise UserError(self._link.refused)
                if self._draining:
                    raise UserError(f"left before the run answered: {self._link.why_silent()}")
                continue
            message = self._decoded(frames[0])
            if isinstance(message, PoolRefused):
                raise UserError(f"the run at {config.connect} refused this pool: {message.reason}")
            if isinstance(message, PoolWelcome):
                self._say(f"joined {config.connect} as {message.name}: up to {message.slots} games at once")
                return message
        raise UserError(f"not joined within {config.wait_s:g} s: {self._link.why_silent()}")

    # ── playing ───────────────────────────────────────────────────────────────────────────────

    async def _play(self, welcome: PoolWelcome) -> PoolSummary:
        terms = welcome.terms
        relay = PolicyRelay(self._context, self._runtime.endpoint("relay.sock"), self._offer)
        pool = PoolSupervisor(
            self._pool_config(terms, relay.endpoint), runtime=self._runtime, log_dir=self._config.log_dir, say=self._say
        )
        self._outbox = Outbox(self._link.socket.send, terms.silence_s)
        self._pool, self._relay = pool, relay
        self._heard_at = time.monotonic()
        loops = [
            self._pulse(terms, welcome.slots),
            self._watch(terms.silence_s),
            relay.run(),
            self._outbox.run(),
            self._listen(),
            self._collect(),
        ]
        tasks = [asyncio.create_task(loop) for loop in loops]
        try:
            ended = await self._until_ended(tasks)
        finally:
            self._offer(PoolLeaves(reason="told to leave"))
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await pool.close(_GRACE_S)
            relay.close()
        return PoolSummary(name=welcome.name, played=self._num_played, failed=self._num_failed, ended=ended)

    async def _until_ended(self, tasks: list[asyncio.Task[None]]) -> str:
        """Why the pool ends; an error in one of its loops is raised."""
        ends: list[asyncio.Future[Any]] = [self._ended, *tasks]
        await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        if not self._ended.done():
            for task in tasks:
                if task.done():
                    task.result()
        return await self._ended

    def _pool_config(self, terms: Terms, endpoint: str) -> PoolConfig:
        return PoolConfig(
            workers=self._config.workers, concurrency=self._config.concurrency, policy_endpoints=(endpoint,),
            sampling=terms.sampling, jury=JuryConfig(agent=terms.jury), episode_timeout_s=terms.episode_timeout_s,
            request_timeout_s=terms.request_timeout_s,
        )  # fmt: skip

    async def _listen(self) -> None:
        while True:
            frames = await receive(self._link.socket)
            self._heard_at = time.monotonic()
            message = self._decoded(frames[0] if frames else b"")
            if isinstance(message, PlayMatch):
                await self._take_match(message.match)
            elif isinstance(message, PolicyAnswer):
                await self._relay.answer(message)
            elif isinstance(message, EpisodeAck):
                await self._acknowledged(message.episode_id)
            elif isinstance(message, CancelMatch):
                await self._pool.cancel(message.episode_id)
            elif isinstance(message, RunEnds):
                self._end("the run is over")
            elif isinstance(message, PoolRefused):
                raise RunError(f"the run sent this pool away: {message.reason}")

    async def _take_match(self, match: Match) -> None:
        spec = self._config.spec
        if match.episode_id in self._matches:
            return
        self._matches[match.episode_id] = match
        if not may_be_one_game(match.env, spec.id):
            self._fail(match, f"this pool plays {shown_id(spec.id)}, not {match.env}")
        elif self._pool.num_free > 0:
            await self._pool.submit(msgspec.structs.replace(match, env=spec.id))
        else:  # a worker died since the last pulse
            self._fail(match, "this pool has no free worker just now")

    async def _collect(self) -> None:
        """Results of the workers, sent until the run has acknowledged them."""
        await self._pool.start()
        while True:
            result = await self._pool.next_result()
            match = self._matches[result.match.episode_id]
            await self._pool.ack(match.episode_id)
            self._outbox.put(match.episode_id, self._encoded(match, result))

    def _encoded(self, match: Match, result: Result) -> bytes:
        if isinstance(result, FailedResult):
            self._num_failed += 1
            self._say(f"episode {match.episode_id}: {result.message}")
            kind = "environment" if result.kind == "invalid" else result.kind
            return self._out.encode(
                EpisodeFailed(
                    episode_id=match.episode_id, kind=kind, message=result.message, traceback=result.traceback
                )
            )
        self._num_played += 1
        data = result.data
        if result.match.env != match.env:  # a file lies elsewhere on the run's host
            data = encode(msgspec.structs.replace(result.episode, match=match))
        return self._out.encode(EpisodeDone(episode_id=match.episode_id, episode=data))

    def _fail(self, match: Match, why: str) -> None:
        message = EpisodeFailed(episode_id=match.episode_id, kind="infrastructure", message=why)
        self._outbox.put(match.episode_id, self._out.encode(message))

    async def _acknowledged(self, episode_id: str) -> None:
        self._matches.pop(episode_id, None)
        self._outbox.forget(episode_id)

    # ── life ──────────────────────────────────────────────────────────────────────────────────

    async def _pulse(self, terms: Terms, max_slots: int) -> None:
        """Say how many games this pool takes: none before its workers are up, and none when it is about to leave."""
        pause_s = min(PULSE_S, terms.silence_s / 5)
        while True:
            ready = self._pool.num_ready * self._config.concurrency
            self._offer(PoolPulse(slots=0 if self._draining else min(ready, max_slots)))
            await asyncio.sleep(pause_s)

    async def _watch(self, silence_s: float) -> None:
        """The run silent, or nothing left to finish: the pool ends. Meanwhile it says what it has played."""
        next_report, reported = 0.0, 0
        while True:
            if self._num_played > reported and time.monotonic() >= next_report:
                next_report, reported = time.monotonic() + _REPORT_EVERY_S, self._num_played
                self._say(f"{self._num_played} games played, {len(self._pool.in_flight)} under way")
            if self._draining and not self._matches:
                self._end("it was told to leave, and has finished its games")
            if time.monotonic() - self._heard_at > silence_s:
                raise EngineError(f"nothing was heard of the run at {self._config.connect} for {silence_s:g} s")
            await asyncio.sleep(_LOOK_S)

    def _end(self, why: str) -> None:
        if not self._ended.done():
            self._ended.set_result(why)

    def _offer(self, message: Any) -> bool:
        return self._link.socket.offer((self._out.encode(message),))

    def _decoded(self, data: bytes) -> Any:
        """A message of the run, or None for what is none, which is said."""
        try:
            return self._in.decode(data)
        except WireError as e:
            self._say(f"a frame of {len(data)} bytes from the run was {e}")
            return None
