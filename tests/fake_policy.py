"""A policy server without a model: answers by a fixed function of what it is asked, or misbehaves as told."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import math
from collections.abc import AsyncIterator
from typing import Any, Literal

import msgspec
import zmq

from selfplay.agent import Answer
from selfplay.types import Span
from selfplay.wire.codec import Codec, encode
from selfplay.wire.messages import (
    PROTOCOL,
    Cancel,
    Choose,
    Chosen,
    EndEpisode,
    FromPolicy,
    Generate,
    Generated,
    PolicyHello,
    PolicyInfo,
    Refused,
    ToPolicy,
)
from selfplay.wire.sockets import bind_router, receive, route

Manner = Literal["answers", "silent", "nan", "unavailable", "other_protocol"]


class FakePolicy:
    """Serves `Generate`, `Choose` and the hello at ``endpoint`` until it is closed."""

    def __init__(self, endpoint: str, *, manner: Manner = "answers", delay_s: float = 0.0) -> None:
        self.endpoint, self.manner, self.delay_s = endpoint, manner, delay_s
        self.active: dict[tuple[bytes, int], str] = {}
        self.ended: list[str] = []
        self.num_generated = 0
        self._answering: set[asyncio.Task[None]] = set()

    async def serve(self) -> None:
        decoder, self._encoder = Codec[Any](ToPolicy), Codec[Any](FromPolicy)
        context = zmq.Context()
        self._socket = bind_router(context, self.endpoint)
        try:
            while True:
                identity, data = await receive(self._socket) or (b"", b"")
                await self._handle(identity, decoder.decode(data))
        finally:
            for task in self._answering:
                task.cancel()
            self._socket.close()
            context.term()

    async def _handle(self, identity: bytes, message: Any) -> None:
        if isinstance(message, PolicyHello):
            await self._reply(identity, self._info(message.request))
        elif isinstance(message, Cancel):
            self.active.pop((identity, message.target), None)
        elif isinstance(message, EndEpisode):
            self.ended.append(message.episode_id)
        elif isinstance(message, Generate | Choose):
            await self._work(identity, message)

    async def _work(self, identity: bytes, message: Generate | Choose) -> None:
        if self.manner == "unavailable":
            await self._reply(identity, Refused(request=message.request, kind="unavailable", message="loading"))
            return
        self.active[identity, message.request] = getattr(message, "episode_id", "")
        if self.manner == "silent":
            return
        if self.delay_s:
            task = asyncio.create_task(self._answer_later(identity, message))
            self._answering.add(task)
            task.add_done_callback(self._answering.discard)
        else:
            await self._answer(identity, message)

    async def _answer_later(self, identity: bytes, message: Generate | Choose) -> None:
        await asyncio.sleep(self.delay_s)
        await self._answer(identity, message)

    async def _answer(self, identity: bytes, message: Generate | Choose) -> None:
        if self.active.pop((identity, message.request), None) is None:
            return
        if isinstance(message, Choose):
            share = 1.0 / len(message.question.labels)
            probabilities = dict.fromkeys(message.question.labels, share)
            await self._reply(identity, Chosen(request=message.request, probabilities=probabilities))
            return
        self.num_generated += 1
        answer = deterministic_answer(message)
        if self.manner == "nan":
            answer = msgspec.structs.replace(answer, logprobs=(math.nan,) * len(answer.logprobs))
        await self._reply(identity, Generated(request=message.request, answer=answer))

    def _info(self, request: int) -> PolicyInfo:
        return PolicyInfo(
            request=request, protocol=PROTOCOL + (self.manner == "other_protocol"), engine="fake", model="fake",
            max_model_len=2048, max_live_adapters=4, stop_ids=(0,), probe_ids=(1, 2),
        )  # fmt: skip

    async def _reply(self, identity: bytes, message: Any) -> None:
        await route(self._socket, identity, self._encoder.encode(message))


def deterministic_answer(message: Generate) -> Answer:
    """Text and tokens decided by the chat and the sampling alone."""
    digest = hashlib.blake2b(encode([message.messages, message.agent, message.sampling]), digest_size=4).digest()
    ids = tuple(digest)
    version = message.pin if isinstance(message.pin, int) else 0
    return Answer(
        text=f"say {digest.hex()}", prompt_ids=tuple(range(5)), sampled_ids=ids, logprobs=(-1.0,) * len(ids),
        spans=(Span(version=version, start=0, end=len(ids)),), stop_reason="stop",
    )  # fmt: skip


@contextlib.asynccontextmanager
async def serving(policy: FakePolicy) -> AsyncIterator[FakePolicy]:
    """The fake server, up for the length of the block."""
    task = asyncio.create_task(policy.serve())
    try:
        yield policy
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
