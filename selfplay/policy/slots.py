"""The slot gate: how many different adapters may be in flight, and who is next.

An engine dies, or silently starves a request, when more adapters are live than it has slots; so requests wait here. The
queue is first come, first served. A request for an adapter that is live already may overtake, which keeps batches full,
but whoever is at the head of the queue is overtaken at most ``max_overtakes`` times: then everybody waits in line until
the head has its slot.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter, deque
from collections.abc import AsyncIterator
from dataclasses import dataclass


@dataclass(eq=False)
class _Waiter:
    name: str
    admitted: asyncio.Future[None]


class SlotGate:
    """Admits requests by adapter name. Not thread-safe: one event loop."""

    def __init__(self, num_slots: int, *, max_overtakes: int = 64) -> None:
        self._num_slots, self._max_overtakes = num_slots, max_overtakes
        self._live: Counter[str] = Counter()
        self._queue: deque[_Waiter] = deque()
        self._overtakes = 0

    @property
    def num_live(self) -> int:
        """Different adapters in flight."""
        return len(self._live)

    @property
    def num_waiting(self) -> int:
        return len(self._queue)

    @contextlib.asynccontextmanager
    async def hold(self, name: str | None) -> AsyncIterator[None]:
        """Wait for a place for adapter ``name`` and keep it inside the block; None (the base) needs no slot."""
        if name is None:
            yield
            return
        await self._enter(name)
        try:
            yield
        finally:
            self._leave(name)

    async def _enter(self, name: str) -> None:
        if not self._queue and self._fits(name):
            self._live[name] += 1
            return
        waiter = _Waiter(name, asyncio.get_running_loop().create_future())
        self._queue.append(waiter)
        self._admit()
        try:
            await waiter.admitted
        except asyncio.CancelledError:
            self._withdraw(waiter)
            raise

    def _leave(self, name: str) -> None:
        self._live[name] -= 1
        if not self._live[name]:
            del self._live[name]
        self._admit()

    def _withdraw(self, waiter: _Waiter) -> None:
        if waiter in self._queue:
            if self._queue[0] is waiter:
                self._overtakes = 0
            self._queue.remove(waiter)
            self._admit()
        else:
            self._leave(waiter.name)  # admitted and cancelled in the same turn of the loop

    def _fits(self, name: str) -> bool:
        return name in self._live or len(self._live) < self._num_slots

    def _admit(self) -> None:
        while self._queue and self._fits(self._queue[0].name) and self._let_in(self._queue[0]):
            self._overtakes = 0
        for waiter in list(self._queue)[1:]:
            if self._overtakes >= self._max_overtakes:
                return
            if waiter.name in self._live and self._let_in(waiter):
                self._overtakes += 1

    def _let_in(self, waiter: _Waiter) -> bool:
        """False for a waiter whose request was cancelled; it is about to withdraw by itself."""
        if waiter.admitted.done():
            return False
        self._queue.remove(waiter)
        self._live[waiter.name] += 1
        waiter.admitted.set_result(None)
        return True
