"""Environments that hold the conversation themselves, asked for one move at a time.

Elsewhere a coroutine calls a model and gets its answer; here a game is told an answer and says what it asks next. A
`Conversation` turns the one into the other: the coroutine runs on an event loop in a thread of its own, and only while
the game's thread waits for it. So nothing runs at the same time, and what the caller swapped in around the call (the state
of the global generators, the standard output) holds for the coroutine too.

    talk = Conversation(lambda ask: library.rollout(client_that_calls(ask)))
    while (question := talk.question) is not None:
        talk.answer(text)
    talk.result
"""

from __future__ import annotations

import asyncio
import functools
import queue
import threading
from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

Q = TypeVar("Q")
R = TypeVar("R")
CLOSING_S = 10.0


Ask = Callable[[Q], Awaitable[str]]
"""Puts a question and comes back with the answer."""


class Conversation(Generic[Q, R]):
    """One coroutine, stopped at its question. What it raises is raised where it was made to go on."""

    def __init__(self, run: Callable[[Ask[Q]], Awaitable[R]]) -> None:
        self.question: Q | None = None
        """What is asked now; None once the coroutine has returned."""
        self.result: R | None = None
        self._run, self._events = run, queue.SimpleQueue[str]()
        self._answer: asyncio.Future[str] | None = None
        self._task = asyncio.run_coroutine_threadsafe(self._until_done(), _loop())
        self._wait()

    def answer(self, text: str) -> None:
        """Answer the question, and wait for the next one or the end."""
        if self._answer is None:
            raise ValueError("the conversation is over: there is no question to answer")
        answer, self._answer, self.question = self._answer, None, None
        _loop().call_soon_threadsafe(answer.set_result, text)
        self._wait()

    def close(self) -> None:
        """Leave it where it is. Does nothing when it is over."""
        if not self._task.done():
            self._task.cancel()
            self._wait(CLOSING_S)
        self._answer = self.question = None

    async def _until_done(self) -> None:
        loop = asyncio.get_running_loop()
        try:
            self.result = await self._run(self._ask)
        except (SystemExit, KeyboardInterrupt) as e:  # these would end the loop, and with it everybody's conversations
            raise RuntimeError(f"the conversation raised {type(e).__name__}: {e}") from e
        finally:
            # On the loop, behind all that ending it may still have put there.
            loop.call_soon_threadsafe(self._events.put, "over")

    async def _ask(self, question: Q) -> str:
        self.question, self._answer = question, asyncio.get_running_loop().create_future()
        answer = self._answer
        self._events.put("asked")
        return await answer

    def _wait(self, limit_s: float | None = None) -> None:
        try:
            event = self._events.get(timeout=limit_s)
        except queue.Empty:
            raise TimeoutError(f"a conversation did not end within {limit_s:g} s of being closed") from None
        if event == "over" and not self._task.cancelled():
            self._task.result(timeout=CLOSING_S)


@functools.cache
def _loop() -> asyncio.AbstractEventLoop:
    """The event loop of all conversations: libraries keep locks and connections that belong to one loop."""
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="conversations", daemon=True).start()
    return loop
