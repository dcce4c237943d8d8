"""A worker's sign of life, readable even while the worker cannot answer: a few numbers in a shared memory map.

The worker's loop writes the time at every tick, and which episode it is running while it runs one. Its supervisor reads.
No message is involved, so a worker that computes for minutes inside one environment call is seen to be at work, for
which episode, and since when; even when that call holds the interpreter lock.

`watch_tasks` makes the board tell the truth about who has the loop: every task started inside ``with episode(...)``,
and every task those start, is noted while it runs.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import math
import mmap
import os
import struct
import time
from collections.abc import Coroutine, Generator, Iterator
from pathlib import Path
from typing import Any, TypeVar

import msgspec

T = TypeVar("T")

_FIELDS = struct.Struct("=ddqq")
_BEAT, _RUNNING = struct.Struct("=d"), struct.Struct("=dqq")
_NOBODY = -1


class Pulse(msgspec.Struct, frozen=True, kw_only=True):
    """What a board says; times are of the machine's monotonic clock."""

    moved_at: float
    """When the loop last did anything. NaN for a board that makes no sense."""
    running: str | None
    """Episode that has the loop now."""
    since: float


class Board:
    """One worker's board; the supervisor creates it, the worker opens it."""

    def __init__(self, path: Path, *, create: bool) -> None:
        fd = os.open(path, os.O_RDWR | (os.O_CREAT | os.O_EXCL if create else 0), 0o600)
        try:
            if create:
                os.ftruncate(fd, _FIELDS.size)
            self._map = mmap.mmap(fd, _FIELDS.size)
        finally:
            os.close(fd)
        self._path = path
        if create:
            self.leave()
            self.beat()

    def beat(self) -> None:
        """The loop turns."""
        _BEAT.pack_into(self._map, 0, time.monotonic())

    def enter(self, index: int, attempt: int) -> None:
        """Episode ``index.attempt`` has the loop from now on."""
        _RUNNING.pack_into(self._map, _BEAT.size, time.monotonic(), index, attempt)

    def leave(self) -> None:
        """No episode has the loop."""
        _RUNNING.pack_into(self._map, _BEAT.size, time.monotonic(), _NOBODY, _NOBODY)

    def read(self) -> Pulse:
        beat, since, index, attempt = _FIELDS.unpack_from(self._map, 0)
        sound = math.isfinite(beat) and math.isfinite(since)
        return Pulse(
            moved_at=max(beat, since) if sound else math.nan,
            running=f"{index}.{attempt}" if index >= 0 else None,
            since=since,
        )

    def close(self, *, remove: bool = False) -> None:
        self._map.close()
        if remove:
            self._path.unlink(missing_ok=True)


_episode: contextvars.ContextVar[tuple[int, int] | None] = contextvars.ContextVar("episode", default=None)


@contextlib.contextmanager
def episode(index: int, attempt: int) -> Iterator[None]:
    """Tasks started inside belong to episode ``index.attempt``, and so do the tasks they start."""
    token = _episode.set((index, attempt))
    try:
        yield
    finally:
        _episode.reset(token)


def watch_tasks(loop: asyncio.AbstractEventLoop, board: Board) -> None:
    """From now on ``loop`` notes on ``board`` each stretch of time in which a task of an episode runs."""

    def make(
        loop: asyncio.AbstractEventLoop, coroutine: Coroutine[Any, Any, T] | Generator[Any, None, T], **kwargs: Any
    ) -> asyncio.Task[T]:
        owner = _episode.get()
        if owner is None or not isinstance(coroutine, Coroutine):
            return asyncio.Task(coroutine, loop=loop, **kwargs)
        return asyncio.Task(_Watched(coroutine, board, *owner), loop=loop, **kwargs)

    loop.set_task_factory(make)


class _Watched(Coroutine[Any, Any, T]):
    """A coroutine that tells the board before and after each of its steps."""

    def __init__(self, inner: Coroutine[Any, Any, T], board: Board, index: int, attempt: int) -> None:
        self._inner, self._board = inner, board
        self._index, self._attempt = index, attempt
        self.__name__ = getattr(inner, "__name__", "episode")
        self.__qualname__ = getattr(inner, "__qualname__", "episode")

    def send(self, value: Any) -> Any:
        self._board.enter(self._index, self._attempt)
        try:
            return self._inner.send(value)
        finally:
            self._board.leave()

    def throw(self, *error: Any) -> Any:
        self._board.enter(self._index, self._attempt)
        try:
            return self._inner.throw(*error)
        finally:
            self._board.leave()

    def close(self) -> None:
        self._inner.close()

    def __await__(self) -> Generator[Any, Any, T]:
        return self._inner.__await__()
