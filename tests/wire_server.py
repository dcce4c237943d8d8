"""A server and clients over real sockets, for the tests of the wire."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import zmq

from selfplay.wire.aio import AsyncSocket
from selfplay.wire.codec import Codec
from selfplay.wire.messages import Done, FromPolicy, Stats, ToPolicy
from selfplay.wire.sockets import Caller, bind_router, connect_dealer, receive, route, unique_identity

to_policy, from_policy = Codec[Any](ToPolicy), Codec[Any](FromPolicy)
Handler = Callable[[AsyncSocket, bytes, Any], Awaitable[None]]


@contextlib.asynccontextmanager
async def server(address: str, handle: Handler) -> AsyncIterator[zmq.Context]:
    """A ROUTER that hands every valid message to ``handle`` and drops the rest."""
    context = zmq.Context()
    router = bind_router(context, address)

    async def serve() -> None:
        while True:
            identity, data = await receive(router) or (b"", b"")
            with contextlib.suppress(Exception):
                await handle(router, identity, to_policy.decode(data))

    task = asyncio.create_task(serve())
    try:
        yield context
    finally:
        task.cancel()
        await asyncio.wait([task])
        router.close()
        context.destroy(linger=0)


async def echo(router: AsyncSocket, identity: bytes, message: Any) -> None:
    await route(router, identity, from_policy.encode(Done(request=message.request)))


def caller(context: zmq.Context, address: str) -> Caller:
    return Caller(connect_dealer(context, address, unique_identity("t")), to_policy, from_policy, "server")


def stats(request: int) -> Stats:
    return Stats(request=request)
