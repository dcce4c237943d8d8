"""Questions of a remote pool's workers on their way to the run: a policy server to the workers, one sender to the run.

    workers ── ToPolicy ──► PolicyRelay ── AskPolicy ──► run
            ◄─ FromPolicy ─             ◄─ PolicyAnswer ─

Each question gets a request id of the relay's own, since every worker counts from one.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import msgspec
import zmq

from selfplay.errors import WireError
from selfplay.wire.codec import Codec
from selfplay.wire.messages import (
    PROTOCOL,
    AskPolicy,
    Cancel,
    Choose,
    EndEpisode,
    FromPolicy,
    Generate,
    PolicyAnswer,
    PolicyHello,
    PolicyInfo,
    Refused,
    ToPolicy,
)
from selfplay.wire.sockets import bind_router, receive, route

Asker = tuple[bytes, int]
"""A worker's identity on the relay's socket, and its own request id."""


class PolicyRelay:
    """Listens at ``endpoint``; ``ask`` sends to the run and says whether that was possible."""

    def __init__(self, context: zmq.Context[Any], endpoint: str, ask: Callable[[AskPolicy], bool]) -> None:
        self.endpoint = endpoint
        self._socket, self._ask = bind_router(context, endpoint), ask
        self._in, self._out = Codec[Any](ToPolicy), Codec[Any](FromPolicy)
        self._numbers = itertools.count(1)
        self._askers: dict[int, Asker] = {}
        self._asked: dict[Asker, int] = {}
        self.num_bad_frames = 0

    @property
    def num_open(self) -> int:
        """Questions that wait for their answer."""
        return len(self._askers)

    async def run(self) -> None:
        """Take questions until cancelled."""
        while True:
            identity, data = await receive(self._socket) or (b"", b"")
            try:
                message = self._in.decode(data)
            except WireError:
                self.num_bad_frames += 1
                continue
            await self._take(identity, message)

    async def answer(self, answer: PolicyAnswer) -> None:
        """Hand an answer of the run to the worker that asked; one that waits no more gets none."""
        asker = self._askers.pop(answer.message.request, None)
        if asker is not None:
            del self._asked[asker]
            await self._reply(asker[0], msgspec.structs.replace(answer.message, request=asker[1]))

    def close(self) -> None:
        self._socket.close()

    async def _take(self, identity: bytes, message: Any) -> None:
        if isinstance(message, Generate | Choose):
            await self._forward((identity, message.request), message)
        elif isinstance(message, Cancel):
            number = self._asked.pop((identity, message.target), None)
            if number is not None:
                del self._askers[number]
                self._ask(AskPolicy(message=Cancel(request=next(self._numbers), target=number)))
        elif isinstance(message, PolicyHello):
            await self._reply(identity, _info(message))
        elif not isinstance(message, EndEpisode):  # the run ends the episodes of its pools itself
            refused = Refused(request=message.request, kind="bad_request", message="a remote pool cannot ask this")
            await self._reply(identity, refused)

    async def _forward(self, asker: Asker, message: Generate | Choose) -> None:
        number = next(self._numbers)
        if self._ask(AskPolicy(message=msgspec.structs.replace(message, request=number))):
            self._askers[number], self._asked[asker] = asker, number
        else:
            refused = Refused(request=message.request, kind="unavailable", message="the run cannot be reached just now")
            await self._reply(asker[0], refused)

    async def _reply(self, identity: bytes, message: Any) -> None:
        await route(self._socket, identity, self._out.encode(message))


def _info(hello: PolicyHello) -> PolicyInfo:
    """All that a worker needs to know of the run's policy servers is that they speak its protocol."""
    return PolicyInfo(
        request=hello.request, protocol=PROTOCOL, engine="remote", model="", max_model_len=0, max_live_adapters=0,
        stop_ids=(), probe_ids=(),
    )  # fmt: skip
