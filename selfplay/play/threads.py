"""Waiting calls beside the event loop: one daemon thread per call, so that none can hold the process back at its end."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


async def in_thread(work: Callable[[], T]) -> T:
    """Run ``work`` in a thread of its own; a daemon, so that no wait for the API can hold the process back."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()

    def settle(result: T) -> None:
        if not future.done():
            future.set_result(result)

    def fail(error: Exception) -> None:
        if not future.done():
            future.set_exception(error)

    def run() -> None:
        with contextlib.suppress(RuntimeError):  # the loop may be closed by the time an answer comes
            try:
                result = work()
            except Exception as e:  # noqa: BLE001 - handed to the task that waits
                loop.call_soon_threadsafe(fail, e)
            else:
                loop.call_soon_threadsafe(settle, result)

    threading.Thread(target=run, name="selfplay-thread", daemon=True).start()
    return await future
