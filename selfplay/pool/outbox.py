"""Results on their way to whoever keeps them: encoded once, sent again with growing pauses until acknowledged."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable

import msgspec

_LONGEST_PAUSE_S = 60.0


class _Parcel(msgspec.Struct):
    data: bytes
    pause_s: float
    next_at: float = 0.0


class Outbox:
    """Holds each result until `forget`.

    >>> outbox = Outbox(socket.send, resend_s=5.0)
    >>> sending = asyncio.create_task(outbox.run())
    >>> outbox.put("7.0", data)
    >>> outbox.forget("7.0")     # its acknowledgement came
    """

    def __init__(self, send: Callable[[bytes], Awaitable[None]], resend_s: float) -> None:
        self._send, self._resend_s = send, resend_s
        self._parcels: dict[str, _Parcel] = {}
        self._something_due = asyncio.Event()

    def __contains__(self, episode_id: str) -> bool:
        return episode_id in self._parcels

    def __len__(self) -> int:
        return len(self._parcels)

    def put(self, episode_id: str, data: bytes) -> None:
        """Send the result of an attempt, from now on."""
        self._parcels[episode_id] = _Parcel(data=data, pause_s=self._resend_s)
        self._something_due.set()

    def forget(self, episode_id: str) -> None:
        """The result is safe elsewhere."""
        self._parcels.pop(episode_id, None)

    async def run(self) -> None:
        """Send what is due, until cancelled."""
        while True:
            self._something_due.clear()
            now = time.monotonic()
            for parcel in list(self._parcels.values()):
                if parcel.next_at <= now:
                    parcel.next_at = now + parcel.pause_s
                    parcel.pause_s = min(2 * parcel.pause_s, _LONGEST_PAUSE_S)
                    await self._send(parcel.data)
            next_at = min((p.next_at for p in self._parcels.values()), default=now + _LONGEST_PAUSE_S)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._something_due.wait(), max(0.0, next_at - time.monotonic()))
