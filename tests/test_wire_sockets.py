"""Sockets under bad peers and bad luck: nothing kills a loop, nothing waits for ever, nothing listens in the open."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket as plain_socket
import time
from pathlib import Path
from typing import Any

import pytest
import zmq
from tests.patience import PATIENCE_S

from selfplay.errors import ConfigError, WireError
from selfplay.types import Episode, Match, SeatAssignment, Turn
from selfplay.wire.codec import MAX_FRAME_BYTES, Codec, encode
from selfplay.wire.messages import Done, EpisodeDone, Stats, WorkerMessage
from selfplay.wire.sockets import (
    HIGH_WATER_MARK,
    bind_router,
    check_listen_address,
    connect_dealer,
    receive,
    route,
    unique_identity,
)
from wire_server import caller, echo, server, stats, to_policy


@pytest.fixture
def address(tmp_path: Path) -> str:
    tmp_path.chmod(0o700)
    return f"ipc://{tmp_path}/s"


# ── addresses ────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    "bad",
    [
        "tcp://*:5555", "tcp://0.0.0.0:5555", "tcp://[::]:5555", "tcp://192.168.0.1:5555", "tcp://eth0:5555",
        f"tcp://{plain_socket.gethostname()}:5555", "tcp://localhost:5555", "tcp://127.0.0.1.evil:1", "tcp://:1",
        "ipc://relative", "ipc://@abstract", "inproc://x", "pgm://x", "udp://127.0.0.1:1", "", "127.0.0.1:5555",
    ],
)  # fmt: skip
def test_open_addresses_are_refused(bad: str) -> None:
    with pytest.raises(ConfigError, match="refusing to listen"):
        check_listen_address(bad)


def test_loopback_and_keys_are_accepted() -> None:
    for good in ("tcp://127.0.0.1:5555", "tcp://[::1]:5555", "tcp://127.0.0.1:*"):
        assert check_listen_address(good) == good
    assert check_listen_address("tcp://10.0.0.1:5", has_curve_keys=True)


def test_ipc_needs_a_private_folder_and_a_short_path(tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    shared.mkdir(mode=0o755)
    shared.chmod(0o755)
    link = tmp_path / "link"
    private = tmp_path / "private"
    private.mkdir(mode=0o700)
    link.symlink_to(private)
    for folder in (shared, link):
        with pytest.raises(ConfigError, match="mode 0700"):
            check_listen_address(f"ipc://{folder}/s")
    with pytest.raises(ConfigError, match="No such file"):
        check_listen_address(f"ipc://{tmp_path}/missing/s")
    with pytest.raises(ConfigError, match="107 bytes"):
        check_listen_address(f"ipc://{tmp_path}/{'é' * 60}/s")
    assert check_listen_address(f"ipc://{private}/s")


def test_a_port_in_use_is_one_clear_line() -> None:
    async def run() -> None:
        context = zmq.Context()
        holder = plain_socket.create_server(("127.0.0.1", 0))
        try:
            with pytest.raises(ConfigError, match=r"cannot listen on tcp://127\.0\.0\.1:.*in use"):
                bind_router(context, f"tcp://127.0.0.1:{holder.getsockname()[1]}")
        finally:
            holder.close()
            context.term()

    asyncio.run(run())


# ── bad peers ────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("count", [1, 2, 3, 200])
def test_messages_of_any_number_of_parts_leave_the_server_working(count: int, address: str) -> None:
    async def run() -> None:
        async with server(address, echo) as context:
            rogue = zmq.Socket(context, zmq.DEALER)
            rogue.connect(address)
            rogue.send_multipart([b"x"] * count)
            rogue.send_multipart([b""] * count)
            rogue.close()
            client = caller(context, address)
            assert isinstance(await client.call(stats, timeout_s=10), Done)
            await client.close()

    asyncio.run(run())


def test_a_message_of_many_parts_is_one_empty_message(address: str) -> None:
    async def run() -> None:
        context = zmq.Context()
        router = bind_router(context, address)
        rogue = connect_dealer(context, address, b"rogue")
        valid = to_policy.encode(Stats(request=1))
        assert rogue.offer([valid] * 10_000)
        await rogue.send(valid)
        assert await receive(router, 10) == [b"rogue", b""]
        assert await receive(router, 10) == [b"rogue", valid]
        assert router.offer([b"rogue", valid, valid])
        assert await receive(rogue, 10) == [b""]
        assert await receive(rogue, 0.05) is None
        context.destroy(linger=0)

    asyncio.run(run())


@pytest.mark.parametrize(
    "data", [b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", b"\x16\x03\x01\x02\x00\x01", b"\xff" * 70_000, b""]
)
def test_plain_connections_and_half_greetings_do_no_harm(data: bytes) -> None:
    async def run() -> None:
        context = zmq.Context()
        router = bind_router(context, "tcp://127.0.0.1:*")
        port = int(router.address.rpartition(":")[2])
        rogues = [plain_socket.create_connection(("127.0.0.1", port)) for _ in range(200)]
        for rogue in rogues:
            with contextlib.suppress(OSError):
                rogue.sendall(data)
        client = connect_dealer(context, router.address, b"client")
        await client.send(b"hello")
        assert await receive(router, 10) == [b"client", b"hello"]
        for rogue in rogues:
            rogue.close()
        context.destroy(linger=0)

    asyncio.run(run())


def test_an_oversized_frame_costs_its_sender_the_connection_only(address: str) -> None:
    async def run() -> None:
        async with server(address, echo) as context:
            rogue = zmq.Socket(context, zmq.DEALER)
            rogue.connect(address)
            rogue.send(bytes(MAX_FRAME_BYTES + 1), copy=False)
            client = caller(context, address)
            assert isinstance(await client.call(stats, timeout_s=20), Done)
            await client.close()
            rogue.close()

    asyncio.run(run())


def test_a_second_peer_of_the_same_identity_is_not_heard_and_steals_nothing(address: str) -> None:
    async def run() -> None:
        context = zmq.Context()
        router = bind_router(context, address)
        first = connect_dealer(context, address, b"worker")
        await first.send(b"1")
        assert await receive(router, 10) == [b"worker", b"1"]
        second = connect_dealer(context, address, b"worker")
        await second.send(b"2")
        assert await receive(router, 0.2) is None
        assert await route(router, b"worker", b"reply")
        assert await receive(first, 10) == [b"reply"]
        assert await receive(second, 0.1) is None
        context.destroy(linger=0)

    asyncio.run(run())


def test_a_reply_to_nobody_is_told(address: str) -> None:
    async def run() -> None:
        context = zmq.Context()
        router = bind_router(context, address)
        assert not await route(router, b"nobody", b"x")
        client = connect_dealer(context, address, b"client")
        await client.send(b"hello")
        assert await receive(router, 10)
        assert await route(router, b"client", b"x")
        client.close()
        while await route(router, b"client", b"x"):
            await asyncio.sleep(0.01)
        context.destroy(linger=0)

    asyncio.run(asyncio.wait_for(run(), PATIENCE_S))


def test_a_peer_that_reads_nothing_fills_its_own_queue_only(address: str) -> None:
    async def run() -> None:
        context = zmq.Context()
        router = bind_router(context, address)
        frozen, live = connect_dealer(context, address, b"frozen"), connect_dealer(context, address, b"live")
        for client in (frozen, live):
            await client.send(b"hello")
            await receive(router, 10)
        num_sent = 0
        while await route(router, b"frozen", bytes(10_000)):
            num_sent += 1
            assert num_sent < 20 * HIGH_WATER_MARK
        assert await route(router, b"live", b"x")
        assert await receive(live, 10) == [b"x"]
        context.destroy(linger=0)

    asyncio.run(run())


# ── receiving ────────────────────────────────────────────────────────────────────────────────────


def test_long_episodes_arrive_in_a_row_and_one_over_the_limit_is_refused_by_name_before_it_is_sent(
    address: str,
) -> None:
    """Four of 200,000 tokens with log-probabilities; between them one of 150 MB, which leaves the stream unharmed."""
    turn = Turn(
        seat="a", agent="pro", round=0, sampled_ids=tuple(range(200_000)), logprobs=(-0.25,) * 200_000, text="t",
        stop_reason="stop",
    )  # fmt: skip
    match = Match(index=0, env="g-v0", seed=5, seats=(SeatAssignment(seat="a", player="llm", agent="pro"),))
    long = encode(
        Episode(
            match=match, env_source="x", turns=(turn,), rewards={"a": 1.0}, winners=("a",), ended="natural", reason=""
        )
    )
    codec: Codec[Any] = Codec(WorkerMessage)

    async def run() -> None:
        context = zmq.Context()
        router = bind_router(context, address)
        worker = connect_dealer(context, address, b"worker")
        for i in range(4):
            await worker.send(codec.encode(EpisodeDone(episode_id=f"{i}.0", episode=long)))
            if i == 1:
                with pytest.raises(WireError, match=rf"of 150\d{{6}} bytes is over the limit of {MAX_FRAME_BYTES}"):
                    codec.encode(EpisodeDone(episode_id="9.0", episode=bytes(150_000_000)))
        for i in range(4):
            _, data = await receive(router, PATIENCE_S) or (b"", b"")
            assert codec.decode(data) == EpisodeDone(episode_id=f"{i}.0", episode=long)
        context.destroy(linger=0)

    asyncio.run(run())


def test_no_message_is_lost_when_receives_time_out_or_are_cancelled(address: str) -> None:
    async def run() -> None:
        context = zmq.Context()
        router = bind_router(context, address)
        client = connect_dealer(context, address, b"client")

        async def send() -> None:
            for i in range(500):
                await client.send(str(i).encode())
                await asyncio.sleep(0 if i % 3 else 0.0005)

        sending = asyncio.create_task(send())
        got: list[int] = []
        num_tries = 0
        while len(got) < 500:
            one = asyncio.create_task(receive(router, 0.001))
            num_tries += 1
            for _ in range(num_tries % 5):
                await asyncio.sleep(0)
            if num_tries % 3:
                one.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                frames = await one
                if frames is not None:
                    got.append(int(frames[1]))
        await sending
        assert got == list(range(500))
        context.destroy(linger=0)

    asyncio.run(asyncio.wait_for(run(), PATIENCE_S))


@pytest.mark.parametrize("ends", ["cancelled", "out of time"])
def test_a_message_that_comes_in_the_same_moment_as_the_end_of_its_receive_is_there_for_the_next(
    ends: str, address: str
) -> None:
    async def run() -> None:
        context = zmq.Context()
        router = bind_router(context, address)
        client = connect_dealer(context, address, b"client")
        await client.send(b"hello")
        assert await receive(router, PATIENCE_S)
        for i in range(50):
            waiting = asyncio.create_task(receive(router))
            while not router._waiting:
                await asyncio.sleep(0)
            (future,) = router._waiting
            assert client.offer((str(i).encode(),))
            while not router._events() & zmq.POLLIN:
                time.sleep(0.001)  # the loop stands still, so that both come in one turn of it
            if ends == "cancelled":
                router._look()
                waiting.cancel()
            else:
                future.set_result(False)
                router._look()
            with contextlib.suppress(asyncio.CancelledError):
                assert await waiting is None
            assert await receive(router, 0) == [b"client", str(i).encode()]
        context.destroy(linger=0)

    asyncio.run(asyncio.wait_for(run(), PATIENCE_S))


def test_a_send_that_uses_up_the_signal_of_a_message_does_not_leave_its_reader_asleep(address: str) -> None:
    async def run() -> None:
        context = zmq.Context()
        router = bind_router(context, address)
        client = connect_dealer(context, address, b"client")
        await client.send(b"hello")
        assert await receive(router, 10)
        reading = asyncio.create_task(receive(client, 5))
        await asyncio.sleep(0.1)
        assert router.offer((b"client", b"reply"))
        time.sleep(0.2)  # the reply arrives while the loop is busy elsewhere ...
        assert client.offer((b"next",))  # ... and this send sees its signal first
        assert await reading == [b"reply"]
        context.destroy(linger=0)

    asyncio.run(run())


def test_a_flood_does_not_starve_other_tasks(address: str) -> None:
    async def run() -> None:
        context = zmq.Context()
        router = bind_router(context, address)
        client = connect_dealer(context, address, b"client")
        for _ in range(1500):
            await client.send(b"x")
        assert await receive(router, 10)
        await asyncio.sleep(0.2)
        num_turns = 0

        async def other() -> None:
            nonlocal num_turns
            while True:
                num_turns += 1
                await asyncio.sleep(0)

        task = asyncio.create_task(other())
        for _ in range(1000):
            await receive(router, 10)
        assert num_turns >= 50
        task.cancel()
        context.destroy(linger=0)

    asyncio.run(run())


def test_nothing_waits_for_unsent_messages_at_the_end(address: str) -> None:
    context = zmq.Context()

    async def run() -> None:
        client = connect_dealer(context, address, b"c")
        for _ in range(100):
            await client.send(bytes(1000))
        client.close()

    asyncio.run(run())
    context.term()


def test_identities_differ_between_starts() -> None:
    assert len({unique_identity("w") for _ in range(1000)}) == 1000
    assert str(os.getpid()).encode() in unique_identity("w")
