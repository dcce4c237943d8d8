"""Every wait of the controller, by name: nothing waits without saying what for, and a stall can say who waits.

    await waits.until("room in the buffer", lambda: buffer.has_room(n))     # woken by `notify`
    waits.describe()    # "collector waits for room in the buffer (12 s)"

There is one deadline for all of them: the controller's watch ends the run when nothing has moved for too long.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable


class Waits:
    """Conditions of one loop; anybody who changes something calls `notify`."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._changed = asyncio.Condition()
        self._open: dict[int, tuple[str, float]] = {}
        self._ids = itertools.count()

    async def until(self, what: str, ready: Callable[[], bool]) -> None:
        """Wait for ``ready``, which is asked again after every `notify`."""
        if ready():
            return
        number = next(self._ids)
        self._open[number] = (what, self._now())
        try:
            async with self._changed:
                await self._changed.wait_for(ready)
        finally:
            del self._open[number]

    async def notify(self) -> None:
        """Something changed: every wait looks again."""
        async with self._changed:
            self._changed.notify_all()

    def describe(self) -> str:
        """What is waited for, the longest wait first."""
        waits = sorted(self._open.values(), key=lambda wait: wait[1])
        return "; ".join(f"{what} ({self._now() - since:.0f} s)" for what, since in waits) or "nothing"
