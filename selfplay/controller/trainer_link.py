"""The controller's side of the trainer ranks: requests to all ranks, replies matched by request and rank."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import zmq.asyncio

from selfplay.errors import SyncError, TrainerError, WireError
from selfplay.wire.codec import Codec
from selfplay.wire.messages import (
    PROTOCOL,
    Export,
    Exported,
    FromTrainer,
    JoinWeights,
    Restore,
    Save,
    Send,
    Sent,
    StepDone,
    Stop,
    ToTrainer,
    TrainerDone,
    TrainerFailed,
    TrainerHello,
    TrainerProbe,
    TrainerProbed,
    TrainerRefused,
    TrainStep,
)
from selfplay.wire.sockets import bind_router, receive, route

R = TypeVar("R")
Make = Callable[[int], Any]


class TrainerLink:
    """All ranks of one trainer behind awaitable calls.

    A rank that reports a failure, or a launcher that saw one die (`fail`), ends every open call with `TrainerError`.
    """

    def __init__(self, context: zmq.asyncio.Context, address: str, num_ranks: int) -> None:
        self._socket = bind_router(context, address)
        self._out: Codec[Any] = Codec(ToTrainer)
        self._in: Codec[Any] = Codec(FromTrainer)
        self._num_ranks = num_ranks
        self._identities: dict[int, bytes] = {}
        self._hellos: dict[int, TrainerHello] = {}
        self._waiting: dict[tuple[int, int], asyncio.Future[Any]] = {}
        self._ids = itertools.count(1)
        self._ready = asyncio.Event()
        self._error: TrainerError | None = None
        self.num_bad_frames = 0
        self._reader = asyncio.create_task(self._read(), name="trainer replies")

    async def ready(self, timeout_s: float) -> TrainerHello:
        """Wait until every rank has said hello; rank 0's hello."""
        try:
            await asyncio.wait_for(self._ready.wait(), timeout_s)
        except TimeoutError:
            missing = sorted(set(range(self._num_ranks)) - set(self._hellos))
            raise TrainerError(f"trainer ranks {missing} were not ready within {timeout_s:.0f} s") from None
        if self._error is not None:
            raise self._error
        return self._hellos[0]

    async def step(
        self,
        *,
        step: int,
        agents: tuple[str, ...],
        micro_batches: Sequence[tuple[tuple[Any, ...], ...]],
        num_actions: dict[str, int],
        num_sequences: dict[str, int],
        timeout_s: float,
    ) -> list[StepDone]:
        """One optimizer step; ``micro_batches[rank]`` goes to that rank. Reports by rank."""

        def make(rank: int, request: int) -> TrainStep:
            return TrainStep(
                request=request,
                step=step,
                agents=agents,
                micro_batches=micro_batches[rank],
                num_actions=num_actions,
                num_sequences=num_sequences,
            )

        return await self._all(make, StepDone, f"step {step}", timeout_s)

    async def probe(self, agent: str, ids: tuple[int, ...], timeout_s: float) -> tuple[float, ...]:
        """Teacher-forced logprobs [T−1] of ``ids`` [T] under the agent as it is now."""
        replies = await self._all(
            lambda _rank, request: TrainerProbe(request=request, agent=agent, ids=ids),
            TrainerProbed, f"probe of {agent}", timeout_s,
        )  # fmt: skip
        return replies[0].logprobs

    async def save(self, folder: str, timeout_s: float, agent: str = "") -> None:
        """Write adapters and optimizer state of all agents, or of one, into ``folder``."""
        await self._all(
            lambda _rank, request: Save(request=request, folder=folder, agent=agent),
            TrainerDone, f"save to {folder}", timeout_s,
        )  # fmt: skip

    async def restore(self, agent: str, folder: str, timeout_s: float) -> None:
        """Take one agent back to what `save` wrote of it."""
        await self._all(
            lambda _rank, request: Restore(request=request, folder=folder, agent=agent),
            TrainerDone, f"restore {agent} from {folder}", timeout_s,
        )  # fmt: skip

    async def export(self, make: Callable[[int], Export], timeout_s: float) -> Exported:
        """Gather one adapter into a bucket for `send`; it is written to the store meanwhile."""
        return await self._one(0, make, Exported, "export", timeout_s)

    async def send(self, make: Callable[[int], Send], timeout_s: float) -> Sent:
        """Move the exported bucket to the engines; the version is durable when this returns. `SyncError`: it did not go out."""
        return await self._one(0, make, Sent, "send", timeout_s)

    async def join_weights(self, make: Callable[[int], JoinWeights], timeout_s: float) -> None:
        """Join the weights group as its rank 0."""
        await self._one(0, make, TrainerDone, "join the weights group", timeout_s)

    async def stop(self, timeout_s: float) -> None:
        """Ask every rank to leave."""
        await self._all(lambda _rank, request: Stop(request=request), TrainerDone, "stop", timeout_s)

    @property
    def is_lost(self) -> bool:
        """A rank is known to be dead."""
        return self._error is not None

    def fail(self, error: TrainerError) -> None:
        """A rank is known to be dead: end every open and later call with ``error``."""
        self._error = self._error or error
        self._ready.set()
        for future in self._waiting.values():
            if not future.done():
                future.set_exception(error)

    async def close(self) -> None:
        self._reader.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._reader
        self._socket.close()

    async def _all(self, make: Callable[[int, int], Any], kind: type[R], what: str, timeout_s: float) -> list[R]:
        request = next(self._ids)
        calls = [
            self._call(rank, request, make(rank, request), kind, what, timeout_s) for rank in range(self._num_ranks)
        ]
        return await asyncio.gather(*calls)

    async def _one(self, rank: int, make: Make, kind: type[R], what: str, timeout_s: float) -> R:
        request = next(self._ids)
        return await self._call(rank, request, make(request), kind, what, timeout_s)

    async def _call(self, rank: int, request: int, message: Any, kind: type[R], what: str, timeout_s: float) -> R:
        if self._error is not None:
            raise self._error
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._waiting[request, rank] = future
        try:
            if not await route(self._socket, self._identities[rank], self._out.encode(message)):
                raise TrainerError(f"trainer rank {rank} cannot be reached")
            reply = await asyncio.wait_for(future, timeout_s)
        except TimeoutError:
            raise TrainerError(f"trainer rank {rank} did not finish {what} within {timeout_s:.0f} s") from None
        finally:
            del self._waiting[request, rank]
        if isinstance(reply, TrainerRefused):
            raise SyncError(f"trainer rank {rank} could not {what}: {reply.message}")
        if not isinstance(reply, kind):
            raise TrainerError(f"trainer rank {rank} answered {what} with {type(reply).__name__}")
        return reply

    async def _read(self) -> None:
        while True:
            frames = await receive(self._socket)
            if frames is None or len(frames) != 2:
                self.num_bad_frames += 1
                continue
            try:
                self._handle(frames[0], self._in.decode(frames[1]))
            except WireError:
                self.num_bad_frames += 1

    def _handle(self, identity: bytes, message: Any) -> None:
        if isinstance(message, TrainerHello):
            self._greet(identity, message)
        elif isinstance(message, TrainerFailed):
            if self._identities.get(message.rank, identity) == identity:
                self.fail(TrainerError(f"trainer rank {message.rank} failed: {message.message}"))
        else:
            rank = getattr(message, "rank", 0)
            future = self._waiting.get((message.request, rank))
            if future is not None and not future.done() and self._identities.get(rank) == identity:
                future.set_result(message)

    def _greet(self, identity: bytes, hello: TrainerHello) -> None:
        if hello.protocol != PROTOCOL:
            self.fail(TrainerError(f"trainer rank {hello.rank} speaks protocol {hello.protocol}, this is {PROTOCOL}"))
        if not 0 <= hello.rank < self._num_ranks or self._identities.setdefault(hello.rank, identity) != identity:
            self.num_bad_frames += 1  # a rank is who greeted first; another peer cannot take its place
            return
        self._hellos[hello.rank] = hello
        if len(self._hellos) == self._num_ranks:
            self._ready.set()
