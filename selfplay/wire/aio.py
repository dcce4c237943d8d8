"""One ZeroMQ socket on the running asyncio loop, with little between the two.

A message that is there is taken, and a message that has room is sent, by a plain non-blocking call; the loop is asked to
wake a waiter only when one has to wait. That takes a third of the time of a future per operation.

ZeroMQ signals its file descriptor on changes only, and any operation on the socket may use up the signal. So whoever
waits looks at the socket's state first, and every operation makes those who still wait look again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import zmq


class AsyncSocket:
    """A ROUTER or DEALER; all calls from the thread of its loop.

    ``take`` and ``offer`` never wait; ``receive`` and ``send`` do.
    """

    def __init__(self, socket: zmq.Socket[bytes]) -> None:
        self._socket = socket
        self._num_parts = 2 if socket.type == zmq.ROUTER else 1
        self._loop: asyncio.AbstractEventLoop | None = None
        self._waiting: dict[asyncio.Future[bool], int] = {}
        self._look_scheduled = False

    @property
    def closed(self) -> bool:
        return self._socket.closed

    @property
    def address(self) -> str:
        """Where a bound socket listens, with the real port."""
        return self._socket.getsockopt_string(zmq.LAST_ENDPOINT).rstrip("\0")

    def take(self) -> list[bytes] | None:
        """A message that is there, or None: ``[identity, data]`` from a ROUTER, ``[data]`` from a DEALER.

        A message of another number of parts comes as an empty ``data``, which no codec takes for a message; surplus
        parts are thrown away one at a time, never gathered.
        """
        socket, wanted = self._socket, self._num_parts
        try:
            frames = [socket.recv(zmq.NOBLOCK)]
        except zmq.Again:
            return None
        num_parts = 1
        while socket.getsockopt(zmq.RCVMORE):
            frame = socket.recv(zmq.NOBLOCK)
            num_parts += 1
            if num_parts <= wanted:
                frames.append(frame)
        self._look_soon()
        return frames if num_parts == wanted else [*frames[: wanted - 1], b""]

    def offer(self, frames: Sequence[bytes]) -> bool:
        """Send if that is possible at once; False when the queue is full or a ROUTER's peer is not there."""
        socket, last = self._socket, len(frames) - 1
        try:
            for i, frame in enumerate(frames):
                socket.send(frame, zmq.NOBLOCK if i == last else zmq.NOBLOCK | zmq.SNDMORE)
        except zmq.Again:
            return False
        except zmq.ZMQError as e:
            if e.errno == zmq.EHOSTUNREACH:
                return False
            raise
        self._look_soon()
        return True

    async def receive(self, timeout_s: float | None = None) -> list[bytes] | None:
        """As `take`, after waiting; None after ``timeout_s``. A cancelled call has taken nothing."""
        deadline = None if timeout_s is None else asyncio.get_running_loop().time() + timeout_s
        while (frames := self.take()) is None:
            if not await self._wait(zmq.POLLIN, deadline):
                return None
        return frames

    async def send(self, data: bytes) -> None:
        """Send to a DEALER's peer, waiting for room in the queue."""
        while not self.offer((data,)):
            await self._wait(zmq.POLLOUT, None)

    def close(self, linger: int | None = None) -> None:
        """Close; whoever waits is cancelled. ``linger`` in milliseconds overrides the socket's own (0)."""
        if self._socket.closed:
            return
        if self._loop is not None and not self._loop.is_closed():
            self._loop.remove_reader(self._socket.FD)
        for future in self._waiting:
            future.cancel()
        self._socket.close(linger)

    async def _wait(self, event: int, deadline: float | None) -> bool:
        """Until the socket may be ready for ``event`` (True) or the time is up (False)."""
        loop = asyncio.get_running_loop()
        if self._loop is None:
            self._loop = loop
            loop.add_reader(self._socket.FD, self._look)
        if self._events() & event:
            return True
        future: asyncio.Future[bool] = loop.create_future()
        self._waiting[future] = event
        timer = None if deadline is None else loop.call_at(deadline, _settle, future, False)
        try:
            return await future
        finally:
            del self._waiting[future]
            if timer is not None:
                timer.cancel()

    def _look_soon(self) -> None:
        """An operation may have used up the signal that a waiter waits for: look again, once per turn of the loop."""
        if self._waiting and not self._look_scheduled and self._loop is not None:
            self._look_scheduled = True
            self._loop.call_soon(self._look)

    def _look(self) -> None:
        self._look_scheduled = False
        if self._socket.closed:
            return
        events = self._events()
        for future, event in self._waiting.items():
            if events & event:
                _settle(future, True)

    def _events(self) -> int:
        return int(self._socket.getsockopt(zmq.EVENTS))


def _settle(future: asyncio.Future[bool], value: bool) -> None:
    if not future.done():
        future.set_result(value)
