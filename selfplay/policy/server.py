"""The policy server process: ``python -m selfplay.policy.server JSON`` with a `PolicyServerConfig`.

    ROUTER ◄── ToPolicy ── workers, controller        every request is a task with a deadline
       │                                              `Cancel` ends the task, and with it the engine's work
       └── FromPolicy ──► the peer that asked

The socket is bound once the engine is up, so the first `PolicyInfo` says that the server is ready. It ends cleanly on
SIGTERM, ignores SIGINT (the controller decides), ends with its parent, and ends at once with exit code 1 and the reason
as the last line of its log when the engine dies.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

import msgspec
import zmq

from selfplay.errors import EXIT_FAULT, EXIT_OK, EXIT_USER, ConfigError, EngineError, SelfplayError, WireError
from selfplay.policy import environ
from selfplay.policy.adapter_check import AdapterRules, rules_of
from selfplay.policy.engine import Engine, make_engine, resolve_engine
from selfplay.policy.rendering import ChatTokenizer
from selfplay.policy.service import PolicyService
from selfplay.policy.settings import PolicyServerConfig
from selfplay.policy.turnover import Refusal
from selfplay.process import live_with_parent
from selfplay.wire.aio import AsyncSocket
from selfplay.wire.codec import Codec
from selfplay.wire.messages import Cancel, Choose, CommitInstall, FromPolicy, Generate, Refused, Score, ToPolicy
from selfplay.wire.sockets import bind_router, receive, route

log = logging.getLogger("selfplay.policy")

WATCH_EVERY_S = 0.2
DEFAULT_TIMEOUT_S = 60.0
"""For requests that carry no limit of their own."""
MAX_TIMEOUT_S = 3600.0
_MAX_MESSAGE = 2000


class PolicyServer:
    """Requests in, replies out, over one ROUTER."""

    def __init__(self, service: PolicyService, socket: AsyncSocket) -> None:
        self._service, self._socket = service, socket
        self._in, self._out = Codec[ToPolicy](ToPolicy), Codec[FromPolicy](FromPolicy)
        self._tasks: dict[tuple[bytes, int], asyncio.Task[None]] = {}
        self.failure: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self.num_bad_frames = 0

    async def serve(self) -> None:
        """Take requests until cancelled; then withdraw what is under way."""
        try:
            while True:
                identity, data = await receive(self._socket) or [b"", b""]
                self._take(identity, data)
        finally:
            tasks = list(self._tasks.values())
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def _take(self, identity: bytes, data: bytes) -> None:
        try:
            message = self._in.decode(data)
        except WireError as e:
            self.num_bad_frames += 1
            self._service.count("bad_frames")
            if self.num_bad_frames <= 10:
                log.warning("a frame of %d bytes was dropped: %s", len(data), str(e)[:200])
            return
        if isinstance(message, Cancel):
            if (task := self._tasks.get((identity, message.target))) is not None:
                task.cancel()
            return
        key = (identity, message.request)
        if key in self._tasks:
            return  # sent again while it is under way: one answer
        self._tasks[key] = asyncio.create_task(self._serve_one(key, message))

    async def _serve_one(self, key: tuple[bytes, int], message: ToPolicy) -> None:
        identity, request = key
        try:
            reply = await self._answer(request, message)
            if reply is not None and not await route(self._socket, identity, self._out.encode(reply)):
                self._service.count("lost_replies")
        except asyncio.CancelledError:
            pass  # withdrawn by its peer, or the server is closing: nobody waits for a reply
        except EngineError as e:
            if not self.failure.done():
                self.failure.set_result(str(e))
        finally:
            self._tasks.pop(key, None)

    async def _answer(self, request: int, message: ToPolicy) -> FromPolicy | None:
        timeout_s = _timeout_of(message)
        try:
            async with asyncio.timeout(timeout_s):
                return await self._service.handle(message)
        except TimeoutError:
            self._service.count("refused")
            return Refused(request=request, kind="timeout", message=f"not answered within {timeout_s:g} s")
        except Refusal as e:
            self._service.count("refused")
            return Refused(request=request, kind=e.kind, message=str(e)[:_MAX_MESSAGE])
        except EngineError:
            raise
        except Exception as e:  # one request's boundary: its peer gets an answer, the others go on
            log.exception("request %d (%s) failed unexpectedly", request, type(message).__name__)
            self._service.count("refused")
            return Refused(
                request=request, kind="bad_request", message=f"unexpected {type(e).__name__}: {e}"[:_MAX_MESSAGE]
            )


def _timeout_of(message: ToPolicy) -> float:
    if isinstance(message, CommitInstall):
        return min(max(message.timeout_s, 0.001) + 5.0, MAX_TIMEOUT_S)  # the engine's own limit speaks first
    if isinstance(message, Generate | Choose | Score):
        return min(max(message.timeout_s, 0.001), MAX_TIMEOUT_S)
    return float(getattr(message, "timeout_s", DEFAULT_TIMEOUT_S)) + 1.0


async def run(config: PolicyServerConfig) -> str | None:
    """Start the engine and serve until SIGTERM; the reason when the engine failed instead."""
    started, terminated = time.monotonic(), asyncio.Event()
    engine = make_engine(config)
    try:
        info = await engine.start()
        chat, rules = load_chat(config)
        service = PolicyService(config, engine, info, chat, rules)
        log.info("serving %s with %s after %.1f s", config.model, info, time.monotonic() - started)
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, terminated.set)
        with _bound(config.address) as socket:
            return await _serve_until(PolicyServer(service, socket), engine, terminated)
    finally:
        if engine.failure() is None:
            await engine.close()


def load_chat(config: PolicyServerConfig) -> tuple[ChatTokenizer, AdapterRules | None]:
    """Tokenizer and adapter rules of the model; the fake engine has its own tokenizer and takes any adapter."""
    if resolve_engine(config.engine) == "fake":
        from selfplay.policy.fake import FakeChat

        return FakeChat(), None
    from selfplay.policy.chat import HfChat

    rules = rules_of(config.model, config.targets, config.max_rank, whole_models=config.whole_models)
    return HfChat(config.model), rules


async def _serve_until(server: PolicyServer, engine: Engine, terminated: asyncio.Event) -> str | None:
    serving = asyncio.create_task(server.serve(), name="serve")
    watching = asyncio.create_task(_watch(engine, server), name="watch the engine")
    ending = asyncio.create_task(terminated.wait(), name="termination")
    try:
        futures: list[asyncio.Future[Any]] = [serving, watching, ending, server.failure]
        await asyncio.wait(futures, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in (serving, watching, ending):
            task.cancel()
        results = await asyncio.gather(serving, watching, ending, return_exceptions=True)
    for result in results:
        if isinstance(result, Exception):
            raise result
    return server.failure.result() if server.failure.done() else None


async def _watch(engine: Engine, server: PolicyServer) -> None:
    while (reason := engine.failure()) is None:
        await asyncio.sleep(WATCH_EVERY_S)
    if not server.failure.done():
        server.failure.set_result(reason)


@contextlib.contextmanager
def _bound(address: str) -> Iterator[AsyncSocket]:
    context: zmq.Context[Any] = zmq.Context()
    try:
        socket = bind_router(context, address)
        try:
            yield socket
        finally:
            socket.close()
    finally:
        context.term()


def main(argument: str) -> NoReturn:
    """Run the server; the process ends here."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s", stream=sys.stderr)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # Loading holds up the event loop for seconds; until it is done there is nothing to finish.
    signal.signal(signal.SIGTERM, lambda *_: leave(EXIT_OK))
    try:
        config = msgspec.json.decode(argument, type=PolicyServerConfig)
    except msgspec.DecodeError as e:
        log.error("policy server: bad configuration: %s", e)
        leave(EXIT_USER)
    live_with_parent(Path(config.runtime_dir), on_orphaned=kill_children)
    environ.apply(config)
    log.info(
        "policy server (pid %d): engine %s (setting: %s)", os.getpid(), resolve_engine(config.engine), config.engine
    )
    try:
        reason = asyncio.run(run(config))
    except (SelfplayError, ImportError) as e:
        log.error("policy server: %s", e)
        leave(EXIT_USER if isinstance(e, ConfigError) else EXIT_FAULT)
    if reason is not None:
        log.error("policy server: %s", reason)
        leave(EXIT_FAULT)
    leave(EXIT_OK)


def kill_children() -> None:
    """SIGKILL the engine's processes."""
    for child in multiprocessing.active_children():
        child.kill()


def leave(code: int) -> NoReturn:
    """End at once, and the engine's processes with it; no destructor gets to wait for the dead."""
    logging.shutdown()
    kill_children()
    os._exit(code)


if __name__ == "__main__":
    main(sys.argv[1])
