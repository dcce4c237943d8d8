"""Requests over the wire: each gets its own reply, an error in time, or is withdrawn."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

import pytest
import zmq
from tests.patience import PATIENCE_S

from selfplay.errors import EngineError
from selfplay.wire.aio import AsyncSocket
from selfplay.wire.messages import Cancel, Done, Probe, ProbeResult, Stats
from selfplay.wire.sockets import HIGH_WATER_MARK, Caller, connect_dealer, route, unique_identity
from wire_server import caller, echo, from_policy, server, stats, to_policy


@pytest.fixture
def address(tmp_path: Path) -> str:
    tmp_path.chmod(0o700)
    return f"ipc://{tmp_path}/s"


def test_many_calls_at_once_get_their_own_replies(address: str) -> None:
    async def shuffled(router: AsyncSocket, identity: bytes, message: Any) -> None:
        async def later() -> None:
            await asyncio.sleep(0.01 * (message.ids[0] % 7))
            reply = ProbeResult(request=message.request, logprobs=(float(message.ids[0]),))
            await route(router, identity, from_policy.encode(reply))

        tasks.append(asyncio.create_task(later()))

    tasks: list[asyncio.Task[None]] = []

    async def run() -> None:
        async with server(address, shuffled) as context:
            client = caller(context, address)

            async def ask(i: int) -> float:
                reply = await client.call(lambda n: Probe(request=n, version=None, ids=(i,)), timeout_s=20)
                return float(reply.logprobs[0])

            assert await asyncio.gather(*(ask(i) for i in range(300))) == [float(i) for i in range(300)]
            assert client.num_open == 0
            await client.close()

    asyncio.run(run())


def test_a_call_that_times_out_or_is_cancelled_is_withdrawn_at_the_server(address: str) -> None:
    seen: list[Any] = []

    async def silent(router: AsyncSocket, identity: bytes, message: Any) -> None:
        seen.append(message)

    def cancel(number: int, target: int) -> Cancel:
        return Cancel(request=number, target=target)

    async def run() -> None:
        async with server(address, silent) as context:
            client = caller(context, address)
            with pytest.raises(EngineError, match=r"server did not answer within 0\.05 s"):
                await client.call(stats, timeout_s=0.05, cancel=cancel)
            task = asyncio.create_task(client.call(stats, timeout_s=60, cancel=cancel))
            while len([m for m in seen if isinstance(m, Stats)]) < 2:
                await asyncio.sleep(0.01)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            while len([m for m in seen if isinstance(m, Cancel)]) < 2:
                await asyncio.sleep(0.01)
            asked = [m.request for m in seen if isinstance(m, Stats)]
            assert [m.target for m in seen if isinstance(m, Cancel)] == asked
            assert client.num_open == 0
            await client.close()

    asyncio.run(asyncio.wait_for(run(), PATIENCE_S))


def test_late_and_bad_replies_are_counted_and_harm_nobody(address: str) -> None:
    async def odd(router: AsyncSocket, identity: bytes, message: Any) -> None:
        await route(router, identity, b"\xc1")
        await route(router, identity, from_policy.encode(Done(request=10_000)))
        await echo(router, identity, message)
        await echo(router, identity, message)

    async def run() -> None:
        async with server(address, odd) as context:
            client = caller(context, address)
            for _ in range(5):
                assert isinstance(await client.call(stats, timeout_s=10), Done)
            while client.num_late < 10:
                await asyncio.sleep(0.01)
            assert (client.num_bad_frames, client.num_late) == (5, 10)
            await client.close()

    asyncio.run(asyncio.wait_for(run(), PATIENCE_S))


def test_a_call_to_a_server_that_is_not_there_ends_in_time_even_with_full_queues(address: str) -> None:
    async def run() -> None:
        context = zmq.Context()
        client = caller(context, address)
        calls = [client.call(stats, timeout_s=0.5) for _ in range(HIGH_WATER_MARK + 100)]
        results = await asyncio.gather(*calls, return_exceptions=True)
        assert all(isinstance(r, EngineError) for r in results)
        client.post(stats)
        await client.close()
        context.destroy(linger=0)

    begun = time.monotonic()
    asyncio.run(asyncio.wait_for(run(), PATIENCE_S))
    assert time.monotonic() - begun < 30


def test_when_nobody_reads_replies_any_more_every_call_fails(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async def silent(router: AsyncSocket, identity: bytes, message: Any) -> None:
        await route(router, identity, from_policy.encode(Done(request=message.request)))

    class Broken:
        def decode(self, data: bytes) -> Any:
            raise RuntimeError("a bug in the reader")

        def encode(self, message: Any) -> bytes:
            raise AssertionError

    async def run() -> None:
        async with server(address, silent) as context:
            socket = connect_dealer(context, address, unique_identity("t"))
            client = Caller(socket, to_policy, Broken(), "server")  # type: ignore[arg-type]
            calls = [client.call(stats, timeout_s=60) for _ in range(3)]
            results = await asyncio.gather(*calls, return_exceptions=True)
            assert all(isinstance(r, EngineError) and "a bug in the reader" in str(r) for r in results)
            with pytest.raises(EngineError, match="a bug in the reader"):
                await client.call(stats, timeout_s=60)
            await client.close()

    asyncio.run(asyncio.wait_for(run(), PATIENCE_S))


def test_closing_fails_open_calls_and_refuses_new_ones(address: str) -> None:
    async def silent(router: AsyncSocket, identity: bytes, message: Any) -> None:
        return None

    async def run() -> None:
        async with server(address, silent) as context:
            client = caller(context, address)
            task = asyncio.create_task(client.call(stats, timeout_s=60))
            await asyncio.sleep(0.05)
            await client.close()
            with pytest.raises(EngineError, match="was closed"):
                await task
            with pytest.raises(EngineError, match="was closed"):
                await client.call(stats, timeout_s=60)
            client.post(stats)
            assert client.num_unsent == 1
            await client.close()

    asyncio.run(asyncio.wait_for(run(), PATIENCE_S))


def test_posts_between_calls_do_not_put_the_reader_to_sleep(address: str) -> None:
    """A send outside the loop's own books can swallow the wake-up of a reply; then calls would wait for ever."""

    async def run() -> None:
        async with server(address, echo) as context:
            client = caller(context, address)
            for _ in range(300):
                call = asyncio.create_task(client.call(stats, timeout_s=20))
                await asyncio.sleep(0)
                client.post(lambda n: Cancel(request=n, target=0))
                assert isinstance(await call, Done)
            await client.close()

    asyncio.run(run())
