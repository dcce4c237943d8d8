"""ZeroMQ sockets as this project uses them, and the one request/reply client.

    ROUTER (one per server, bound)  ⇄  DEALER (one per client process start, connected)

Mandatory routing (a reply that cannot be delivered raises instead of vanishing), finite high-water marks and frame size,
linger 0, identities unique per process start. A listener is an ipc path or loopback; anything else needs CURVE keys.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import secrets
from collections.abc import Callable
from typing import Any, Protocol, TypeVar, cast

import zmq
import zmq.asyncio

from selfplay.errors import ConfigError, EngineError, WireError
from selfplay.wire.codec import MAX_FRAME_BYTES, Codec

HIGH_WATER_MARK = 2048
"""Messages queued per peer before a sender has to wait."""


def unique_identity(kind: str) -> bytes:
    """A peer identity that no other process start has."""
    return f"{kind}-{os.getpid()}-{secrets.token_hex(4)}".encode()


def check_listen_address(address: str, *, has_curve_keys: bool = False) -> str:
    """Return ``address`` when it may be bound: ipc, loopback tcp, or any tcp with CURVE keys; else `ConfigError`."""
    if address.startswith("ipc:///"):
        return address
    host = address.removeprefix("tcp://").rpartition(":")[0].strip("[]")
    if address.startswith("tcp://") and (host in {"127.0.0.1", "::1"} or has_curve_keys):
        return address
    raise ConfigError(
        f"refusing to listen on {address}: only ipc:///path and loopback (tcp://127.0.0.1:port) are open without CURVE keys"
    )


def bind_router(context: zmq.asyncio.Context, address: str) -> zmq.asyncio.Socket:
    """A bound ROUTER. Raises `ConfigError` for an address that must not or cannot be bound (port in use, ...)."""
    socket = _configured(context.socket(zmq.ROUTER))
    socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
    socket.setsockopt(zmq.ROUTER_HANDOVER, 0)
    try:
        socket.bind(check_listen_address(address))
    except zmq.ZMQError as e:
        socket.close()
        raise ConfigError(f"cannot listen on {address}: {e.strerror}") from e
    return socket


def connect_dealer(context: zmq.asyncio.Context, address: str, identity: bytes) -> zmq.asyncio.Socket:
    """A connected DEALER that speaks as ``identity``."""
    socket = _configured(context.socket(zmq.DEALER))
    socket.setsockopt(zmq.IDENTITY, identity)
    socket.connect(address)
    return socket


def _configured(socket: zmq.asyncio.Socket) -> zmq.asyncio.Socket:
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.SNDHWM, HIGH_WATER_MARK)
    socket.setsockopt(zmq.RCVHWM, HIGH_WATER_MARK)
    socket.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME_BYTES)
    return socket


async def receive(socket: zmq.asyncio.Socket, timeout_s: float | None = None) -> list[bytes] | None:
    """The next multipart message, or None after ``timeout_s``. Polls first, so a cancel never loses a message."""
    if not await socket.poll(None if timeout_s is None else int(timeout_s * 1000), zmq.POLLIN):
        return None
    return cast("list[bytes]", await socket.recv_multipart())


async def route(socket: zmq.asyncio.Socket, identity: bytes, data: bytes) -> bool:
    """Send ``data`` to one peer of a ROUTER; False when that peer is gone or its queue is full."""
    try:
        await socket.send_multipart([identity, data], flags=zmq.NOBLOCK)
    except zmq.Again:
        return False
    except zmq.ZMQError as e:
        if e.errno == zmq.EHOSTUNREACH:
            return False
        raise
    return True


class HasRequest(Protocol):
    """Any message that is answered by request id."""

    @property
    def request(self) -> int: ...


Reply = TypeVar("Reply")


class Caller:
    """Requests over one DEALER, many at a time, matched to replies by request id.

    >>> caller = Caller(socket, Codec(ToPolicy), Codec(FromPolicy))
    >>> reply = await caller.call(lambda request: Probe(request=request, ...), timeout_s=5.0)

    A reply of unknown id (late, after a timeout) is dropped and counted in ``num_late``.
    """

    def __init__(self, socket: zmq.asyncio.Socket, outgoing: Codec[Any], incoming: Codec[Any], peer: str) -> None:
        self._socket, self._out, self._in, self._peer = socket, outgoing, incoming, peer
        self._ids = itertools.count(1)
        self._waiting: dict[int, asyncio.Future[HasRequest]] = {}
        self._reader = asyncio.create_task(self._read(), name=f"replies of {peer}")
        self.num_late = 0
        self.num_bad_frames = 0

    async def call(self, make: Callable[[int], HasRequest], *, timeout_s: float, cancel: Callable[[int, int], HasRequest] | None = None) -> Any:
        """Send ``make(request_id)`` and return its reply.

        Raises `EngineError` after ``timeout_s`` or when the reader failed. When the caller is cancelled or times out,
        ``cancel(new_id, request_id)`` is sent, so that the server stops working for nobody.
        """
        request = next(self._ids)
        future: asyncio.Future[HasRequest] = asyncio.get_running_loop().create_future()
        self._waiting[request] = future
        try:
            await self._socket.send(self._out.encode(make(request)))
            return await asyncio.wait_for(future, timeout_s)
        except TimeoutError:
            self._withdraw(request, cancel)
            raise EngineError(f"{self._peer} did not answer within {timeout_s:.0f} s") from None
        except asyncio.CancelledError:
            self._withdraw(request, cancel)
            raise
        finally:
            self._waiting.pop(request, None)

    def post(self, make: Callable[[int], HasRequest]) -> None:
        """Send a message that has no reply; dropped when the peer's queue is full."""
        with contextlib.suppress(zmq.Again):
            zmq.Socket.send(_plain(self._socket), self._out.encode(make(next(self._ids))), zmq.NOBLOCK)

    def fail(self, error: Exception) -> None:
        """End every open call with ``error`` (the peer is known to be dead)."""
        for future in self._waiting.values():
            if not future.done():
                future.set_exception(error)

    async def close(self) -> None:
        """Stop reading and close the socket; open calls fail."""
        self._reader.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._reader
        self.fail(EngineError(f"connection to {self._peer} was closed"))
        self._socket.close()

    def _withdraw(self, request: int, cancel: Callable[[int, int], HasRequest] | None) -> None:
        if cancel is not None and not self._socket.closed:
            self.post(lambda new: cancel(new, request))

    async def _read(self) -> None:
        while True:
            frames = await receive(self._socket)
            try:
                message = self._in.decode(frames[-1] if frames else b"")
            except WireError:
                self.num_bad_frames += 1
                continue
            future = self._waiting.get(message.request)
            if future is None or future.done():
                self.num_late += 1
            else:
                future.set_result(message)


def _plain(socket: zmq.asyncio.Socket) -> zmq.Socket[bytes]:
    return zmq.Socket.shadow(socket.underlying)
