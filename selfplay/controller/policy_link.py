"""The controller's side of one policy server: installing versions, making them current, probing."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import zmq.asyncio

from selfplay.agent import Message
from selfplay.environment import JuryQuestion
from selfplay.errors import EngineError, SyncError
from selfplay.types import BASE, PolicyVersion
from selfplay.wire.codec import Codec
from selfplay.wire.messages import (
    PROTOCOL,
    AbortInstall,
    BeginInstall,
    BucketHeader,
    Choose,
    Chosen,
    CommitInstall,
    Done,
    Flights,
    FromPolicy,
    Hold,
    JoinWeights,
    MakeCurrent,
    Pin,
    PolicyHello,
    PolicyInfo,
    Probe,
    ProbeResult,
    Refused,
    Release,
    Retire,
    Score,
    Scored,
    Stats,
    StatsResult,
    ToPolicy,
)
from selfplay.wire.sockets import Caller, connect_dealer, unique_identity

R = TypeVar("R")
HELLO_EVERY_S = 1.0


class NotNow(SyncError):
    """The server refuses what it may grant later, such as room for one more version."""


class PolicyLink:
    """Control calls to one policy server. `EngineError` when it is gone, `SyncError` when it refuses a version."""

    def __init__(self, context: zmq.asyncio.Context, address: str) -> None:
        socket = connect_dealer(context, address, unique_identity("controller"))
        self._caller = Caller(socket, Codec(ToPolicy), Codec(FromPolicy), "the policy server")
        self._error: EngineError | None = None

    async def ready(self, timeout_s: float) -> PolicyInfo:
        """Wait until the server answers; what it serves."""
        try:
            async with asyncio.timeout(timeout_s):
                info = await self._first_answer()
        except TimeoutError:
            raise EngineError(f"the policy server was not ready within {timeout_s:.0f} s") from None
        if info.protocol != PROTOCOL:
            raise EngineError(f"the policy server speaks protocol {info.protocol}, this is {PROTOCOL}")
        return info

    async def _first_answer(self) -> PolicyInfo:
        while True:
            try:
                return await self._call(
                    lambda request: PolicyHello(request=request, protocol=PROTOCOL), PolicyInfo, HELLO_EVERY_S
                )
            except EngineError:
                if self._error is not None:
                    raise

    async def join_weights(self, make: Callable[[int], JoinWeights], timeout_s: float) -> None:
        await self._call(make, Done, timeout_s)

    async def begin_install(self, version: PolicyVersion, header: BucketHeader, timeout_s: float) -> None:
        """Have the server receive a version beside generation; `NotNow` while what is in use leaves no room."""
        await self._call(lambda request: BeginInstall(request=request, version=version, header=header), Done, timeout_s)

    async def commit_install(self, version: PolicyVersion, timeout_s: float) -> dict[str, float]:
        """Make a received version addressable; what the server measured about it."""
        done = await self._call(
            lambda request: CommitInstall(request=request, version=version, timeout_s=timeout_s), Done, timeout_s + 5.0
        )
        return done.values

    async def abort_install(self, version: PolicyVersion, timeout_s: float) -> None:
        await self._call(lambda request: AbortInstall(request=request, version=version), Done, timeout_s)

    async def make_current(self, version: PolicyVersion, flights: Flights, timeout_s: float) -> dict[str, float]:
        """Turn the agent over to ``version``; what became of its answers under way, see `MakeCurrent`."""
        done = await self._call(
            lambda request: MakeCurrent(request=request, version=version, flights=flights), Done, timeout_s
        )
        return done.values

    async def hold(self, agents: tuple[str, ...], *, abort: bool, timeout_s: float, lease_s: float) -> dict[str, float]:
        """Keep ``agents`` (empty: everybody) from generating, and wait until they have stopped; see `Hold`."""
        done = await self._call(
            lambda request: Hold(request=request, agents=agents, abort=abort, timeout_s=timeout_s, lease_s=lease_s),
            Done, timeout_s + 5.0,
        )  # fmt: skip
        return done.values

    async def release(self, timeout_s: float) -> None:
        """End a hold."""
        await self._call(lambda request: Release(request=request), Done, timeout_s)

    async def retire(self, version: PolicyVersion, timeout_s: float) -> None:
        await self._call(lambda request: Retire(request=request, version=version), Done, timeout_s)

    async def probe(self, version: PolicyVersion | None, ids: tuple[int, ...], timeout_s: float) -> tuple[float, ...]:
        """Teacher-forced logprobs [T−1] of ``ids`` [T] as the engine computes them."""
        reply = await self._call(
            lambda request: Probe(request=request, version=version, ids=ids), ProbeResult, timeout_s
        )
        return reply.logprobs

    async def score(
        self, version: PolicyVersion | None, messages: Sequence[Message], answers: Sequence[str], timeout_s: float
    ) -> tuple[float, ...]:
        """Log-probability of each of ``answers`` as the next turn of a chat, its end included (None: base)."""
        agent, pin = (BASE, 0) if version is None else (version.agent, version.version)
        reply = await self._call(
            lambda request: Score(
                request=request, agent=agent, pin=pin, messages=tuple(messages), answers=tuple(answers), timeout_s=timeout_s
            ),
            Scored, timeout_s,
        )  # fmt: skip
        return reply.logprobs

    async def choose(self, agent: str, pin: Pin, question: JuryQuestion, timeout_s: float) -> dict[str, float]:
        """Probability of each label of ``question`` under ``agent``."""
        reply = await self._call(
            lambda request: Choose(request=request, agent=agent, pin=pin, question=question, timeout_s=timeout_s),
            Chosen, timeout_s + 1.0,
        )  # fmt: skip
        return reply.probabilities

    async def stats(self, timeout_s: float) -> dict[str, float]:
        reply = await self._call(lambda request: Stats(request=request), StatsResult, timeout_s)
        return reply.values

    @property
    def is_lost(self) -> bool:
        """The server is known to be dead."""
        return self._error is not None

    def fail(self, error: EngineError) -> None:
        """The server is known to be dead: end every open and later call with ``error``."""
        self._error = self._error or error
        self._caller.fail(error)

    async def close(self) -> None:
        await self._caller.close()

    async def _call(self, make: Callable[[int], Any], kind: type[R], timeout_s: float) -> R:
        if self._error is not None:
            raise self._error
        reply = await self._caller.call(make, timeout_s=timeout_s)
        if isinstance(reply, Refused):
            raise (NotNow if reply.kind == "unavailable" else SyncError)(f"the policy server refused: {reply.message}")
        if not isinstance(reply, kind):
            raise EngineError(f"the policy server answered with {type(reply).__name__} instead of {kind.__name__}")
        return reply
