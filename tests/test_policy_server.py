"""The server as a process: ready, frames that are no messages, ending in every way, and nothing left behind."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import pytest
from tests.patience import PATIENCE_S
from tests.policy_served import RefusedError, Served, kill, served, wait_until_gone
from tests.runs import abandoned_shared_memory

from selfplay.environment import JuryQuestion
from selfplay.models import tiny
from selfplay.policy import PolicyServerConfig
from selfplay.policy.engine import resolve_engine
from selfplay.process import RuntimeDir
from selfplay.wire.messages import Cancel, Choose, Stats
from selfplay.wire.sockets import connect_dealer, unique_identity


def test_frames_that_are_no_messages_are_dropped_and_others_served(tmp_path: Path) -> None:
    with served(tmp_path, engine="fake") as server:

        async def play() -> None:
            socket = connect_dealer(server._context, server.config.address, unique_identity("stranger"))
            for frame in (b"", b"\x80\x04N.", b"GET / HTTP/1.1\r\n\r\n", b"\xc7\x01\x02x", b"\xdd\xff\xff\xff\xff"):
                await socket.send(frame)
            assert (await server.ask("base")).stop_reason == "stop"
            with pytest.raises(RefusedError, match="unknown agent"):
                await server.ask("nobody")
            socket.close()
            stats = await server.stats()
            assert (stats["bad_frames"], stats["refused"], stats["requests"]) == (5, 1, 1)

        server.run(play())
        assert "a frame of" in server.child.log.read_text("utf-8")


def test_a_request_that_breaks_in_the_engine_is_refused_and_others_served(tmp_path: Path) -> None:
    with served(tmp_path, engine="fake") as server:

        async def play() -> None:
            labels = tuple(f"label {i}" for i in range(100))  # more than the fake engine can spread its mass over
            question = JuryQuestion(system="s", prompt="p", lead="", labels=labels)
            with pytest.raises(RefusedError, match="unexpected ValueError"):
                await server.call(Choose, agent="base", pin="turn", question=question, timeout_s=5.0)
            assert (await server.ask("base")).stop_reason == "stop"

        server.run(play())


def test_requests_of_two_clients_with_one_number_do_not_meet(tmp_path: Path) -> None:
    """Request ids are per client; a cancel reaches only its own client's request."""
    with served(tmp_path, engine="fake", fake_tokens_per_s=40.0) as server:

        async def play() -> None:
            other = await server.connect()
            mine = asyncio.create_task(server.ask("base", num=9))
            await asyncio.sleep(0.05)
            for target in range(20):
                other.post(lambda request, target=target: Cancel(request=request, target=target))  # type: ignore[misc]
            assert len((await mine).sampled_ids) == 9
            await other.close()

        server.run(play())


def test_sigterm_ends_it_cleanly_and_sigint_does_not(tmp_path: Path) -> None:
    with served(tmp_path, engine="fake") as server:
        os.kill(server.child.pid, signal.SIGINT)
        assert server.run(server.ask("base")).stop_reason == "stop"
        os.kill(server.child.pid, signal.SIGTERM)
        assert exit_code(server) == 0


def test_sigterm_with_requests_in_flight(tmp_path: Path) -> None:
    with served(tmp_path, engine="fake", fake_tokens_per_s=0.1) as server:

        async def play() -> None:
            asking = asyncio.create_task(server.ask("base", timeout_s=1.0))
            await asyncio.sleep(0.2)
            os.kill(server.child.pid, signal.SIGTERM)
            while server.child.exit_code() is None:
                await asyncio.sleep(0.01)
            asking.cancel()
            await asyncio.gather(asking, return_exceptions=True)

        server.run(play())
        assert server.child.exit_code() == 0


def test_it_ends_with_its_parent_and_removes_the_runtime_folder(tmp_path: Path) -> None:
    runtime = RuntimeDir.create()
    config = PolicyServerConfig(
        address=runtime.endpoint("policy"), runtime_dir=str(runtime.path), model="none", engine="fake"
    )
    argument = msgspec.json.encode(config).decode()
    parent = (
        "import subprocess, sys, time, os\n"
        f"p = subprocess.Popen([sys.executable, '-m', 'selfplay.policy.server', {argument!r}], stdin=subprocess.PIPE)\n"
        "print(p.pid, flush=True)\n"
        f"while not os.path.exists({str(runtime.file('policy'))!r}): time.sleep(0.02)\n"
        "os.kill(os.getpid(), 9)\n"
    )
    with (tmp_path / "log").open("wb") as log:
        done = subprocess.run(
            [sys.executable, "-c", parent], stdout=subprocess.PIPE, stderr=log, check=False, timeout=PATIENCE_S
        )
    assert done.returncode == -signal.SIGKILL
    pid = int(done.stdout)
    deadline = time.monotonic() + PATIENCE_S
    while (Path(f"/proc/{pid}").exists() or runtime.path.exists()) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not runtime.path.exists()


def run_to_the_end(argument: str) -> tuple[int, list[str]]:
    """Exit code and log lines of a server that cannot start; its lifeline stays open meanwhile."""
    lifeline, held = os.pipe()
    try:
        done = subprocess.run(
            [sys.executable, "-m", "selfplay.policy.server", argument],
            stdin=lifeline, capture_output=True, text=True, check=False, timeout=PATIENCE_S,
        )  # fmt: skip
    finally:
        os.close(lifeline)
        os.close(held)
    return done.returncode, done.stderr.strip().splitlines()


@pytest.mark.parametrize(
    ("argument", "words"),
    [
        ("{}", "missing required field `address`"),
        ('{"address": "ipc:///x", "runtime_dir": "/x", "model": "m", "speed": 3}', "unknown field `speed`"),
        ("no json", "bad configuration"),
    ],
)
def test_a_bad_configuration_is_one_line(argument: str, words: str) -> None:
    code, said = run_to_the_end(argument)
    assert code == 2
    assert len(said) == 1
    assert words in said[0]


def test_an_open_address_is_refused(tmp_path: Path) -> None:
    config = PolicyServerConfig(address="tcp://0.0.0.0:0", runtime_dir=str(tmp_path), model="none", engine="fake")
    code, said = run_to_the_end(msgspec.json.encode(config).decode())
    assert code == 2
    assert "refusing to listen on tcp://0.0.0.0:0" in said[-1]


def test_auto_takes_vllm_where_it_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object() if name == "vllm" else None)
    assert resolve_engine("auto") == "vllm"
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert resolve_engine("auto") == "transformers"
    assert resolve_engine("fake") == "fake"


def test_a_model_folder_that_cannot_be_loaded_is_said_at_the_end_of_the_log(tmp_path: Path) -> None:
    config = PolicyServerConfig(
        address="ipc:///x",
        runtime_dir=str(tmp_path),
        model=str(tmp_path / "nothing"),
        engine="transformers",
        dtype="float32",
    )
    code, said = run_to_the_end(msgspec.json.encode(config).decode())
    assert code == 1
    assert "policy server: transformers cannot load" in said[-1]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("model")
    tiny.write(folder)
    return str(folder)


@pytest.mark.engine
def test_killing_the_server_leaves_no_engine_behind(tmp_path: Path, model: str) -> None:
    before = abandoned_shared_memory()
    with served(tmp_path, engine="vllm", model=model, dtype="float32") as server:
        processes = server.processes()
        assert any("EngineCore" in p.name() for p in processes)
        kill(server.child.pid)
        assert wait_until_gone(processes, PATIENCE_S) == []
    assert abandoned_shared_memory() <= before


@pytest.mark.engine
def test_the_death_of_the_engine_ends_the_server_with_the_reason(tmp_path: Path, model: str) -> None:
    before = abandoned_shared_memory()
    with served(tmp_path, engine="vllm", model=model, dtype="float32") as server:
        processes = server.processes()
        kill(next(p.pid for p in processes if "EngineCore" in p.name()))
        assert exit_code(server) == 1
        assert wait_until_gone(processes, PATIENCE_S) == []
        assert "policy server: vLLM's engine process ended" in server.child.log_tail()
    assert abandoned_shared_memory() <= before


@pytest.mark.engine
def test_sigterm_ends_vllm_too(tmp_path: Path, model: str) -> None:
    with served(tmp_path, engine="vllm", model=model, dtype="float32") as server:
        assert server.run(server.call(Stats)).values["requests"] == 0
        processes = server.processes()
        os.kill(server.child.pid, signal.SIGTERM)
        assert exit_code(server) == 0
        assert wait_until_gone(processes, PATIENCE_S) == []


def exit_code(server: Served) -> int | None:
    """How the server ended, waiting for it."""
    deadline = time.monotonic() + PATIENCE_S
    while (code := server.child.exit_code()) is None and time.monotonic() < deadline:
        time.sleep(0.02)
    return code
