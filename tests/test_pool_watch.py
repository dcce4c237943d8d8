"""The supervisor's judgement of its workers, with a clock and workers that tests move by hand."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import zmq
from tests.patience import PATIENCE_S

from pool_site import make_config, make_match
from selfplay.errors import WorkerError
from selfplay.pool import FailedResult, PoolSupervisor
from selfplay.pool.config import WorkerConfig
from selfplay.process import RuntimeDir
from selfplay.wire.codec import Codec, encode
from selfplay.wire.messages import (
    PROTOCOL,
    ControllerMessage,
    EpisodeAck,
    EpisodeDone,
    EpisodeFailed,
    PlayMatch,
    WorkerHello,
    WorkerMessage,
)
from selfplay.wire.sockets import connect_dealer, receive

outgoing, incoming = Codec[Any](WorkerMessage), Codec[Any](ControllerMessage)


class FakeWorker:
    """A worker without a process: says what a test tells it to say."""

    def __init__(self, config: WorkerConfig, context: zmq.Context[Any], pid: int) -> None:
        self.config, self.pid, self.code, self.killed, self.signals = config, pid, None, False, list[int]()
        self.socket = connect_dealer(context, config.controller, config.worker.encode())

    async def hello(self, protocol: int = PROTOCOL, name: str = "", pid: int = 0) -> None:
        await self.say(WorkerHello(protocol=protocol, worker=name or self.config.worker, pid=pid or self.pid))

    async def say(self, message: Any) -> None:
        await self.socket.send(outgoing.encode(message))

    async def heard(self) -> Any:
        (data,) = await receive(self.socket, 10.0) or (b"",)
        return incoming.decode(data)

    def exit_code(self) -> int | None:
        return self.code

    def describe_exit(self) -> str:
        return f"exit code {self.code}"

    def log_tail(self, num_lines: int) -> str:
        return "File game.py, line 3"

    def signal(self, number: int) -> None:
        self.signals.append(number)

    def kill(self) -> None:
        self.killed, self.code = True, -9
        self.socket.close()


class Stage:
    """A pool on a clock of its own."""

    def __init__(self, tmp_path: Path, **changes: Any) -> None:
        self.ahead_s, self.workers, self.said = 0.0, list[FakeWorker](), list[str]()
        self.runtime = RuntimeDir.create()
        self.context = zmq.Context()
        self.pool = PoolSupervisor(
            make_config(**changes),
            runtime=self.runtime,
            log_dir=tmp_path,
            say=self.said.append,
            launch=self.launch,
            monotonic=self.now,
        )

    def now(self) -> float:
        import time

        return time.monotonic() + self.ahead_s

    def launch(self, config: WorkerConfig, log: Path) -> FakeWorker:
        self.workers.append(FakeWorker(config, self.context, pid=1000 + len(self.workers)))
        return self.workers[-1]

    async def started(self) -> FakeWorker:
        starting = asyncio.create_task(self.pool.start())
        while not self.workers:
            await asyncio.sleep(0.01)
        await self.workers[0].hello()
        await starting
        return self.workers[0]


@contextlib.asynccontextmanager
async def stage(tmp_path: Path, **changes: Any) -> AsyncIterator[Stage]:
    on = Stage(tmp_path, **changes)
    try:
        yield on
    finally:
        await on.pool.close(0.0)
        for worker in on.workers:
            worker.socket.close()
        on.context.term()
        on.runtime.remove()


def run(scenario: Any) -> None:
    asyncio.run(asyncio.wait_for(scenario(), PATIENCE_S))


def test_a_worker_that_never_says_hello_is_ended(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with stage(tmp_path, start_timeout_s=50.0) as on:
            starting = asyncio.create_task(on.pool.start())
            await asyncio.sleep(0.3)
            assert not starting.done()
            on.ahead_s = 51.0
            with pytest.raises(WorkerError, match="did not start for 5"):
                await starting
            assert on.workers[0].killed

    run(scenario)


def test_the_death_of_a_worker_that_holds_no_game_is_said(tmp_path: Path) -> None:
    """No episode is lost with it, so none would tell."""

    async def scenario() -> None:
        async with stage(tmp_path, max_restarts=1) as on:
            worker = await on.started()
            worker.code = -9
            while len(on.workers) < 2:
                await asyncio.sleep(0.01)
            assert on.said == ["environment worker: exit code -9"]
            assert on.pool.num_restarts == 1

    run(scenario)


def test_a_worker_of_another_protocol_is_refused_with_both_numbers(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with stage(tmp_path) as on:
            starting = asyncio.create_task(on.pool.start())
            while not on.workers:
                await asyncio.sleep(0.01)
            await on.workers[0].hello(protocol=PROTOCOL + 1)
            with pytest.raises(WorkerError, match=f"speaks protocol {PROTOCOL + 1}, this controller {PROTOCOL}"):
                await starting

    run(scenario)


def test_an_idle_loop_is_alive_as_long_as_its_board_moves(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with stage(tmp_path, episode_timeout_s=100.0, grace_s=10.0) as on:
            worker = await on.started()
            await on.pool.submit(make_match(0))
            assert isinstance(await worker.heard(), PlayMatch)
            on.ahead_s = 109.0
            await asyncio.sleep(0.3)
            assert not worker.killed
            on.ahead_s = 111.0
            result = await on.pool.next_result()
            assert isinstance(result, FailedResult)
            assert (result.kind, result.reason) == ("infrastructure", "worker lost")
            assert worker.killed

    run(scenario)


def test_a_lost_worker_may_not_speak_any_more(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with stage(tmp_path, max_restarts=1) as on:
            first = await on.started()
            await on.pool.submit(make_match(0))
            first.code = 1
            assert (await on.pool.next_result()).kind == "infrastructure"
            while len(on.workers) < 2:
                await asyncio.sleep(0.01)
            second = on.workers[1]
            assert second.config.worker != first.config.worker
            await second.hello()
            ghost = connect_dealer(on.context, first.config.controller, first.config.worker.encode() + b"-ghost")
            failed = EpisodeFailed(episode_id="0.0", kind="environment", message="late")
            await ghost.send(outgoing.encode(failed))
            while not on.pool.counts.get("unknown_sender"):
                await asyncio.sleep(0.01)
            await on.pool.submit(make_match(0, attempt=1))
            await second.say(failed)
            while not on.pool.counts.get("late"):
                await asyncio.sleep(0.01)
            assert [h.episode_id for h in on.pool.in_flight] == ["0.1"]
            ghost.close()

    run(scenario)


def test_one_worker_cannot_end_the_lease_of_another(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with stage(tmp_path, workers=2, concurrency=1) as on:
            starting = asyncio.create_task(on.pool.start())
            while len(on.workers) < 2:
                await asyncio.sleep(0.01)
            for worker in on.workers:
                await worker.hello()
            await starting
            await on.pool.submit(make_match(0))
            await on.pool.submit(make_match(1))
            holder = {h.episode_id: h.worker for h in on.pool.in_flight}
            liar = next(w for w in on.workers if w.config.worker != holder["0.0"])
            await liar.say(EpisodeFailed(episode_id="0.0", kind="environment", message="forged"))
            while not on.pool.counts.get("late"):
                await asyncio.sleep(0.01)
            assert len(on.pool.in_flight) == 2

    run(scenario)


def test_bad_frames_and_false_hellos_are_dropped_and_counted(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with stage(tmp_path) as on:
            worker = await on.started()
            for frame in (b"", b"\xc1", b"GET / HTTP/1.1\r\n\r\n", b"\x91" * 3000):
                await worker.socket.send(frame)
            await worker.hello(name="env-9-other")
            await worker.hello(pid=77)
            while on.pool.counts.get("bad_frames", 0) < 6:
                await asyncio.sleep(0.01)
            await on.pool.submit(make_match(0))
            assert isinstance(await worker.heard(), PlayMatch)
            await worker.say(EpisodeDone(episode_id="0.0", episode=encode([1])))
            assert (await on.pool.next_result()).kind == "invalid"
            await on.pool.ack("0.0")
            assert await worker.heard() == EpisodeAck(episode_id="0.0")

    run(scenario)


def test_results_already_in_are_handed_out_before_the_end_is_told(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with stage(tmp_path) as on:
            worker = await on.started()
            await on.pool.submit(make_match(0))
            await on.pool.submit(make_match(1))
            await worker.say(EpisodeFailed(episode_id="0.0", kind="environment", message="m"))
            worker.code = 1
            assert (await on.pool.next_result()).match.index == 0
            assert (await on.pool.next_result()).match.index == 1
            with pytest.raises(WorkerError, match="max_restarts=0"):
                await on.pool.next_result()
            with pytest.raises(WorkerError):
                await on.pool.submit(make_match(2))

    run(scenario)


def test_a_fault_of_the_pool_itself_reaches_who_waits(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with stage(tmp_path) as on:
            worker = await on.started()

            def broken() -> int:
                raise RuntimeError("a bug")

            worker.exit_code = broken  # type: ignore[method-assign]
            with pytest.raises(WorkerError, match="a bug"):
                await on.pool.next_result()
            worker.exit_code = lambda: 0  # type: ignore[method-assign]

    run(scenario)
