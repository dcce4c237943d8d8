"""ZeroMQ sockets as this project uses them, and the one request/reply client.

    ROUTER (one per server, bound)  ⇄  DEALER (one per client process start, connected)

Mandatory routing (a reply that cannot be delivered raises instead of vanishing), finite high-water marks and frame size,
linger 0, identities unique per process start. A listener is an ipc path or loopback; anything else needs CURVE keys.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import secrets
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import zmq

from selfplay.errors import ConfigError, EngineError, WireError
from selfplay.wire.aio import AsyncSocket
from selfplay.wire.codec import MAX_FRAME_BYTES, Codec

HIGH_WATER_MARK = 2048
"""Messages queued per peer before a sender has to wait."""

_CALLS_PER_TURN = 16
"""Messages taken before other tasks run. More than one: what they cause is then sent together, which costs a third."""
_calls = itertools.count(1)

MAX_IPC_PATH_BYTES = 107
"""The kernel's limit on a Unix socket path."""


def unique_identity(kind: str) -> bytes:
    """A peer identity that no other process start has."""
    return f"{kind}-{os.getpid()}-{secrets.token_hex(4)}".encode()


def check_listen_address(address: str, *, has_curve_keys: bool = False) -> str:
    """Return ``address`` when it may be bound: a private ipc path, loopback tcp, or any tcp with CURVE keys.

    Raises `ConfigError` for everything else, before a socket exists.
    """
    if address.startswith("ipc:///"):
        _check_ipc_path(Path(address.removeprefix("ipc://")))
        return address
    host = address.removeprefix("tcp://").rpartition(":")[0].strip("[]")
    if address.startswith("tcp://") and (host in {"127.0.0.1", "::1"} or has_curve_keys):
        return address
    raise ConfigError(
        f"refusing to listen on {address}: only ipc:///path and loopback (tcp://127.0.0.1:port) are open without CURVE keys"
    )


def _check_ipc_path(path: Path) -> None:
    """An ipc socket must fit the kernel's limit and lie in a folder that only its owner can enter."""
    if len(os.fsencode(path)) > MAX_IPC_PATH_BYTES:
        raise ConfigError(
            f"cannot listen on ipc://{path}: socket paths end at {MAX_IPC_PATH_BYTES} bytes; use a shorter folder"
        )
    try:
        folder = path.parent.lstat()
    except OSError as e:
        raise ConfigError(f"cannot listen on ipc://{path}: {path.parent} {e.strerror}") from e
    if not stat.S_ISDIR(folder.st_mode) or folder.st_uid != os.geteuid() or folder.st_mode & 0o077:
        raise ConfigError(f"refusing to listen on ipc://{path}: {path.parent} must be your own folder of mode 0700")


def bind_router(context: zmq.Context[Any], address: str) -> AsyncSocket:
    """A bound ROUTER. Raises `ConfigError` for an address that must not or cannot be bound (port in use, ...).

    A second peer under an identity that is taken is never heard (no hand-over): it cannot steal the first one's replies.
    """
    socket = configured(context, zmq.ROUTER)
    bind(socket, address)
    return AsyncSocket(socket)


def bind(socket: zmq.Socket[bytes], address: str, *, has_curve_keys: bool = False) -> None:
    """Make a ROUTER listen; it is closed when that raises `ConfigError`."""
    try:
        check_listen_address(address, has_curve_keys=has_curve_keys)
        socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        socket.setsockopt(zmq.ROUTER_HANDOVER, 0)
        socket.bind(address)
    except ConfigError:
        socket.close()
        raise
    except zmq.ZMQError as e:
        socket.close()
        raise ConfigError(f"cannot listen on {address}: {e.strerror}") from e


def connect_dealer(context: zmq.Context[Any], address: str, identity: bytes) -> AsyncSocket:
    """A connected DEALER that speaks as ``identity``."""
    socket = configured(context, zmq.DEALER)
    socket.setsockopt(zmq.IDENTITY, identity)
    socket.connect(address)
    return AsyncSocket(socket)


def configured(context: zmq.Context[Any], kind: int) -> zmq.Socket[bytes]:
    """A socket with this project's limits, not yet bound or connected."""
    socket: zmq.Socket[bytes] = context.socket(kind, socket_class=zmq.Socket)
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.SNDHWM, HIGH_WATER_MARK)
    socket.setsockopt(zmq.RCVHWM, HIGH_WATER_MARK)
    socket.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME_BYTES)
    socket.setsockopt(zmq.IPV6, 1)
    return socket


async def receive(socket: AsyncSocket, timeout_s: float | None = None) -> list[bytes] | None:
    """The next message, or None after ``timeout_s``: ``[identity, data]`` from a ROUTER, ``[data]`` from a DEALER.

    A message of another number of parts comes as an empty ``data``, which no codec takes for a message. A cancelled call
    never loses a message; and every so many calls other tasks run, so a flood of messages does not starve the loop.
    """
    if next(_calls) % _CALLS_PER_TURN == 0:
        await asyncio.sleep(0)
    return await socket.receive(timeout_s)


async def route(socket: AsyncSocket, identity: bytes, data: bytes) -> bool:
    """Send ``data`` to one peer of a ROUTER; False when that peer is gone or its queue is full."""
    return socket.offer((identity, data))


class HasRequest(Protocol):
    """Any message that is answered by request id."""

    @property
    def request(self) -> int: ...


class Caller:
    """Requests over one DEALER, many at a time, matched to replies by request id.

    >>> caller = Caller(socket, Codec(ToPolicy), Codec(FromPolicy), "policy server")
    >>> reply = await caller.call(lambda request: Probe(request=request, ...), timeout_s=5.0)

    A reply of unknown id (late, after a timeout) is dropped and counted in ``num_late``; a frame that is no valid
    message in ``num_bad_frames``; a post that found the peer's queue full in ``num_unsent``.
    """

    def __init__(self, socket: AsyncSocket, outgoing: Codec[Any], incoming: Codec[Any], peer: str) -> None:
        self._socket, self._out, self._in, self._peer = socket, outgoing, incoming, peer
        self._ids = itertools.count(1)
        self._waiting: dict[int, asyncio.Future[HasRequest]] = {}
        self._broken: Exception | None = None
        self.num_late = 0
        self.num_bad_frames = 0
        self.num_unsent = 0
        self._reader = asyncio.create_task(self._read(), name=f"replies of {peer}")
        self._reader.add_done_callback(self._reader_ended)

    @property
    def num_open(self) -> int:
        """Calls that wait for their reply."""
        return len(self._waiting)

    async def call(
        self,
        make: Callable[[int], HasRequest],
        *,
        timeout_s: float,
        cancel: Callable[[int, int], HasRequest] | None = None,
    ) -> Any:
        """Send ``make(request_id)`` and return its reply.

        Raises `EngineError` after ``timeout_s`` (which covers waiting for room in the queue too), when the reader failed,
        or when the connection was closed. When the caller is cancelled or times out, ``cancel(new_id, request_id)`` is
        sent, so that the server stops working for nobody.
        """
        if self._broken is not None:
            raise self._broken
        request = next(self._ids)
        data = self._out.encode(make(request))
        loop = asyncio.get_running_loop()
        self._waiting[request] = future = loop.create_future()
        timer = loop.call_later(timeout_s, _expire, future)
        try:
            if not self._socket.offer((data,)):
                async with asyncio.timeout(timeout_s):
                    await self._socket.send(data)
            return await future
        except TimeoutError:
            self._withdraw(request, cancel)
            raise EngineError(f"{self._peer} did not answer within {timeout_s:.3g} s") from None
        except asyncio.CancelledError:
            self._withdraw(request, cancel)
            raise
        finally:
            timer.cancel()
            del self._waiting[request]
            if future.done() and not future.cancelled():
                future.exception()  # seen, also when something else ended the call first

    def post(self, make: Callable[[int], HasRequest]) -> None:
        """Send a message that has no reply; dropped and counted when the peer's queue is full or the socket is closed."""
        if self._socket.closed or not self._socket.offer((self._out.encode(make(next(self._ids))),)):
            self.num_unsent += 1

    def fail(self, error: Exception) -> None:
        """End every open call with ``error`` (the peer is known to be dead)."""
        for future in self._waiting.values():
            if not future.done():
                future.set_exception(error)

    async def close(self) -> None:
        """Stop reading and close the socket; open calls fail, later ones are refused."""
        self._broken = EngineError(f"connection to {self._peer} was closed")
        self._reader.cancel()
        await asyncio.wait([self._reader])
        self.fail(self._broken)
        self._socket.close()

    def _withdraw(self, request: int, cancel: Callable[[int, int], HasRequest] | None) -> None:
        if cancel is not None:
            self.post(lambda new: cancel(new, request))

    async def _read(self) -> None:
        while True:
            frames = await receive(self._socket)
            try:
                message = self._in.decode(frames[0] if frames else b"")
            except WireError:
                self.num_bad_frames += 1
                continue
            future = self._waiting.get(message.request)
            if future is None or future.done():
                self.num_late += 1
            else:
                future.set_result(message)

    def _reader_ended(self, reader: asyncio.Task[None]) -> None:
        """Nobody reads replies any more: whatever ended the reader ends every open and later call."""
        error = None if reader.cancelled() else reader.exception()
        if self._broken is None:
            self._broken = EngineError(
                f"nothing reads the replies of {self._peer} any more: {error or 'reader cancelled'}"
            )
        self.fail(self._broken)


def _expire(future: asyncio.Future[Any]) -> None:
    if not future.done():
        future.set_exception(TimeoutError())
