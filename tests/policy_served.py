"""A real policy server process and everything a test asks of it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import Coroutine, Iterator
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import psutil
import zmq
from tests.policy_samples import adapter_config, chat

from selfplay.agent import Message, Sampling
from selfplay.policy import PolicyServerConfig
from selfplay.process import Child, RuntimeDir, spawn
from selfplay.types import PolicyVersion
from selfplay.wire.codec import Codec
from selfplay.wire.messages import (
    PROTOCOL,
    BeginInstall,
    BucketHeader,
    CommitInstall,
    FromPolicy,
    Generate,
    MakeCurrent,
    PolicyHello,
    PolicyInfo,
    Probe,
    Refused,
    Retire,
    Stats,
    ToPolicy,
)
from selfplay.wire.sockets import Caller, connect_dealer, unique_identity

T = TypeVar("T")
START_S, ANSWER_S = 240.0, 90.0


class RefusedError(Exception):
    """The server said no."""


class Served:
    """One server process, and a connection to it that lives in a loop of its own."""

    def __init__(self, place: Path, **settings: Any) -> None:
        self.runtime = RuntimeDir.create()
        self.num_sent = 0
        self.newest: dict[str, int] = {}
        self.long = 160 if settings.get("engine") == "transformers" else 400
        """Tokens of an answer that outlives a version being installed, on an engine of this speed."""
        self.config = PolicyServerConfig(
            **{
                "address": self.runtime.endpoint("policy"),
                "runtime_dir": str(self.runtime.path),
                "model": "none",
                "max_model_len": 1024,
                "kv_cache_mb": 64,
                **settings,
            }
        )
        self.child: Child = spawn(
            "policy", "selfplay.policy.server", msgspec.json.encode(self.config).decode(), log=place / "policy.log"
        )
        self._runner = asyncio.Runner()
        self._context: zmq.Context[Any] = zmq.Context()
        self.caller = self.run(self._connect())
        self.info: PolicyInfo

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        return self._runner.run(work)

    async def connect(self) -> Caller:
        """One more client."""
        return await self._connect()

    async def _connect(self) -> Caller:
        socket = connect_dealer(self._context, self.config.address, unique_identity("test"))
        return Caller(socket, Codec(ToPolicy), Codec(FromPolicy), "the policy server")

    async def _ready(self) -> PolicyInfo:
        hello = asyncio.create_task(
            self.caller.call(lambda request: PolicyHello(request=request, protocol=PROTOCOL), timeout_s=START_S)
        )
        while not hello.done():
            await asyncio.sleep(0.05)
            if self.child.exit_code() is not None:
                hello.cancel()
                raise AssertionError(self.child.describe_exit())
        info: PolicyInfo = await hello
        return info

    async def call(self, kind: type[Any], **fields: Any) -> Any:
        """Send one message; raises `RefusedError`."""
        reply = await self.caller.call(lambda request: kind(request=request, **fields), timeout_s=ANSWER_S)
        if isinstance(reply, Refused):
            raise RefusedError(f"{reply.kind}: {reply.message}")
        return reply

    async def ask(self, agent: str, text: str = "hello", *, num: int = 12, pin: Any = "turn", **changes: Any) -> Any:
        """A greedy answer."""
        fields: dict[str, Any] = {
            "episode_id": "0.0", "agent": agent, "pin": pin, "messages": chat(text), "known_messages": 0,
            "prefix_ids": (), "sampling": Sampling(temperature=0.0, max_tokens=num), "timeout_s": 60.0, **changes,
        }  # fmt: skip
        return (await self.call(Generate, **fields)).answer

    async def steps(self, num: int = 8) -> None:
        """Wait until the engine has made so many steps: what was asked before has begun to answer by then."""
        await asyncio.sleep(0)  # tasks that were just made send first
        assert len((await self.ask("base", num=num)).sampled_ids) == num

    async def heard(self) -> None:
        """Wait until the server has begun with everything that was sent before."""
        await asyncio.sleep(0)
        await self.stats()

    async def stats(self) -> dict[str, float]:
        values: dict[str, float] = (await self.call(Stats)).values
        return values

    async def probe(self, version: str | None, ids: tuple[int, ...]) -> tuple[float, ...]:
        named = None if version is None else PolicyVersion.parse(version)
        logprobs: tuple[float, ...] = (await self.call(Probe, version=named, ids=ids)).logprobs
        return logprobs

    async def publish(
        self, version: str, tensors: dict[str, Any], *, current: bool = True, **changes: Any
    ) -> dict[str, float]:
        """Send an adapter through shared memory and install it; ``changes`` spoil the header."""
        from selfplay.sync import make_sender, pack

        self.num_sent += 1
        address = str(self.runtime.file(f"weights-{self.num_sent}"))
        bucket = pack(tensors, dtype="float32", transport="shm", address=address, adapter_config=adapter_config())
        sender = make_sender("shm", address="", world_size=2, timeout_s=5)
        try:
            await asyncio.to_thread(sender.send, bucket, 5)
            return await self.install(version, msgspec.structs.replace(bucket.header, **changes), current=current)
        finally:
            sender.close()

    async def install(self, version: str, header: BucketHeader, *, current: bool = True) -> dict[str, float]:
        """Begin, commit and make current."""
        named = PolicyVersion.parse(version)
        await self.call(BeginInstall, version=named, header=header)
        values: dict[str, float] = (await self.call(CommitInstall, version=named, timeout_s=20.0)).values
        if current:
            await self.call(MakeCurrent, version=named)
        return values

    async def renew(self, agent: str, tensors: dict[str, Any]) -> int:
        """Publish the next version of ``agent``, retire the one before; its number."""
        number = self.newest[agent] = self.newest.get(agent, -1) + 1
        await self.publish(f"{agent}@{number}", tensors)
        if number:
            await self.retire(f"{agent}@{number - 1}")
        return number

    async def stage(self, agent: str, tensors: dict[str, Any]) -> int:
        """Install the next version of ``agent`` beside the current one, which stays current; its number."""
        number = self.newest[agent] = self.newest[agent] + 1
        await self.publish(f"{agent}@{number}", tensors, current=False)
        return number

    async def take_over(self, agent: str, number: int, flights: str = "finish") -> dict[str, float]:
        """Make a staged version current; what became of the answers under way on the one before, which retires."""
        done = await self.call(MakeCurrent, version=PolicyVersion(agent, number), flights=flights)
        await self.retire(f"{agent}@{number - 1}")
        values: dict[str, float] = done.values
        return values

    async def retire(self, version: str) -> None:
        await self.call(Retire, version=PolicyVersion.parse(version))

    def processes(self) -> list[psutil.Process]:
        """The server and everything it started."""
        me = psutil.Process(self.child.pid)
        return [me, *me.children(recursive=True)]

    def close(self) -> None:
        self.run(self.caller.close())
        self._runner.close()
        self._context.term()
        self.child.stop(10)
        self.runtime.remove()


@contextlib.contextmanager
def served(place: Path, **settings: Any) -> Iterator[Served]:
    server = Served(place, **settings)
    try:
        server.info = server.run(server._ready())
        yield server
    finally:
        server.close()


def wait_until_gone(processes: list[psutil.Process], seconds: float) -> list[str]:
    """Wait for processes to end; those that did not."""
    deadline = time.monotonic() + seconds
    while (left := [p for p in processes if _lives(p)]) and time.monotonic() < deadline:
        time.sleep(0.05)
    return [f"{p.pid} {p.name()}" for p in left]


def _lives(process: psutil.Process) -> bool:
    try:
        return bool(process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)


def follow(answer: Any, text: str, more: str) -> dict[str, Any]:
    """The fields of the turn after ``answer``."""
    messages = (*chat(text), Message("assistant", answer.text), Message("user", more))
    return {"messages": messages, "known_messages": 3, "prefix_ids": answer.prompt_ids + answer.sampled_ids}
