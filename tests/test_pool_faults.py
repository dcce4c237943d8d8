"""What breaks in a pool and what it costs: games that raise, exit, hang or compute; workers that die or lie."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import psutil
import pytest
from tests.patience import PATIENCE_S

from fake_policy import FakePolicy, serving
from pool_site import install, make_config, make_match, play_all, running_pool
from selfplay.errors import WorkerError
from selfplay.pool import EpisodeResult, FailedResult, PoolSupervisor
from selfplay.process import RuntimeDir
from selfplay.wire.messages import PROTOCOL


@pytest.fixture
def runtime(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    install(tmp_path / "site", monkeypatch)
    runtime = RuntimeDir.create()
    yield runtime
    runtime.remove()


def test_a_game_that_raises_in_every_fifth_episode_costs_those_and_no_other(runtime, tmp_path: Path) -> None:
    async def run():
        async with running_pool(make_config(workers=2), runtime, tmp_path / "logs") as pool:
            matches = [make_match(i, **({"fault": "raise", "at": 3} if i % 5 == 0 else {})) for i in range(40)]
            done, failures = await play_all(pool, matches)
            assert pool.num_restarts == 0
            return done, failures

    done, failures = asyncio.run(run())
    assert sorted(done) == [i for i in range(40) if i % 5]
    assert sorted(f.match.index for f in failures) == list(range(0, 40, 5))
    for failure in failures:
        assert (failure.kind, failure.reason) == ("environment", "raised")
        assert "pool-test-v0" in failure.message
        assert "turn 2" in failure.message
        assert "bad card 53" in failure.message
        assert 'raise ValueError("bad card 53")' in failure.traceback


@pytest.mark.parametrize(("fault", "says"), [("sys.exit", "SystemExit"), ("input", "EOFError")])
def test_games_that_leave_or_read_the_terminal_fail_alone(fault: str, says: str, runtime, tmp_path: Path) -> None:
    async def run():
        async with running_pool(make_config(), runtime, tmp_path / "logs") as pool:
            return await play_all(pool, [make_match(0, fault=fault, at=1), make_match(1), make_match(2)])

    done, failures = asyncio.run(run())
    assert sorted(done) == [1, 2]
    assert [f.kind for f in failures] == ["environment"]
    assert says in failures[0].message


@pytest.mark.parametrize(
    ("fault", "says"),
    [("big number", "info['number'] is 1180591620717411303424"), ("big text", "bytes is over the limit of 67108864")],
)
def test_results_that_cannot_be_sent_fail_alone_by_name(fault: str, says: str, runtime, tmp_path: Path) -> None:
    async def run():
        async with running_pool(make_config(), runtime, tmp_path / "logs") as pool:
            ended = await play_all(pool, [make_match(0, fault=fault), make_match(1), make_match(2)])
            assert pool.num_restarts == 0
            return ended

    done, failures = asyncio.run(run())
    assert sorted(done) == [1, 2]
    assert [f.kind for f in failures] == ["environment"]
    assert says in failures[0].message


def test_an_unknown_game_fails_with_the_nearest_name(runtime, tmp_path: Path) -> None:
    async def run():
        async with running_pool(make_config(), runtime, tmp_path / "logs") as pool:
            return await play_all(pool, [make_match(0, env="pool-tset-v0")])

    _, failures = asyncio.run(run())
    assert "did you mean 'pool-test-v0'" in failures[0].message


def test_a_killed_worker_costs_its_episodes_only_and_they_are_played_again(runtime, tmp_path: Path) -> None:
    async def run():
        async with serving(FakePolicy(runtime.endpoint("policy.sock"), delay_s=0.05)) as policy:
            config = make_config(workers=2, concurrency=4, max_restarts=1, policy_endpoints=(policy.endpoint,))
            async with running_pool(config, runtime, tmp_path / "logs") as pool:
                playing = asyncio.create_task(play_all(pool, [make_match(i, player="talker") for i in range(24)]))
                while len(pool.in_flight) < 8:
                    await asyncio.sleep(0.01)
                victim = pool.in_flight[0].worker
                of_victim = {h.episode_id for h in pool.in_flight if h.worker == victim}
                os.kill(pool.pids[victim], signal.SIGKILL)
                done, failures = await playing
                return done, failures, of_victim, pool.num_restarts

    done, failures, of_victim, num_restarts = asyncio.run(asyncio.wait_for(run(), PATIENCE_S))
    assert sorted(done) == list(range(24))
    assert num_restarts == 1
    assert failures
    assert {f.match.episode_id for f in failures} <= of_victim
    assert {(f.kind, f.reason) for f in failures} == {("infrastructure", "worker lost")}
    assert all("SIGKILL" in f.message for f in failures)
    replayed = {f.match.index for f in failures}
    assert {i: r.match.attempt for i, r in done.items()} == {i: int(i in replayed) for i in range(24)}


@pytest.mark.parametrize(
    ("match", "says"),
    [
        ({"env": "pool-test-import-v0"}, "exit code 139"),
        ({"fault": "exit at reset"}, "exit code 139"),
        ({"fault": "exit at step", "at": 2}, "exit code 139"),
        ({"fault": "kill", "at": 2}, "SIGKILL"),
    ],
)
def test_a_game_that_ends_its_process_is_named_and_spends_the_budget(match, says: str, runtime, tmp_path: Path) -> None:
    seen: list[FailedResult] = []

    async def play_on(pool: PoolSupervisor) -> None:
        following = make_match(0, **match)
        while True:
            await pool.submit(following)
            result = await pool.next_result()
            assert isinstance(result, FailedResult)
            seen.append(result)
            following = msgspec.structs.replace(following, attempt=following.attempt + 1)

    async def run() -> None:
        async with running_pool(make_config(max_restarts=2), runtime, tmp_path / "logs") as pool:
            with pytest.raises(WorkerError) as spent:
                await play_on(pool)
            assert "max_restarts=2" in str(spent.value)
            assert says in str(spent.value)
            with pytest.raises(WorkerError):
                await pool.next_result()

    asyncio.run(asyncio.wait_for(run(), PATIENCE_S))
    assert len(seen) == 3
    for failure in seen:
        assert failure.kind == "infrastructure"
        assert says in failure.message
        assert failure.match.env in failure.message
        assert str(failure.match.seed) in failure.message


def test_workers_that_die_at_once_are_noticed_at_once(runtime, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = tmp_path / "broken"
    broken.mkdir()
    (broken / "zmq.py").write_text("raise ImportError('this zmq is broken')")
    monkeypatch.setenv("PYTHONPATH", f"{broken}{os.pathsep}{os.environ['PYTHONPATH']}")

    async def run() -> None:
        async with running_pool(make_config(max_restarts=1), runtime, tmp_path / "logs"):
            pytest.fail("a pool without workers has started")

    with pytest.raises(WorkerError, match="this zmq is broken") as dead:
        asyncio.run(asyncio.wait_for(run(), PATIENCE_S))
    assert "exit code 1" in str(dead.value)


def test_a_worker_that_computes_for_long_is_alive(runtime, tmp_path: Path) -> None:
    """It answers nothing for many watch intervals and longer than the limit of a stuck *idle* loop would be."""

    async def run():
        async with running_pool(make_config(), runtime, tmp_path / "logs") as pool:
            matches = [make_match(0, fault="busy", at=1, busy_s=5.0), *(make_match(i) for i in range(1, 8))]
            done, failures = await play_all(pool, matches)
            assert pool.num_restarts == 0
            return done, failures

    done, failures = asyncio.run(run())
    assert sorted(done) == list(range(8))
    assert not failures


@pytest.mark.parametrize("match", [{"fault": "sleep", "at": 2}, {"env": "pool-test-stuck-v0"}])
def test_a_game_that_never_returns_is_blamed_and_not_played_again(match, runtime, tmp_path: Path) -> None:
    async def run():
        async with serving(FakePolicy(runtime.endpoint("policy.sock"))) as policy:
            config = make_config(
                max_restarts=1, episode_timeout_s=1.0, grace_s=0.5, policy_endpoints=(policy.endpoint,)
            )
            async with running_pool(config, runtime, tmp_path / "logs") as pool:
                return await play_all(
                    pool, [make_match(0, **match), *(make_match(i, player="talker") for i in range(1, 8))]
                )

    done, failures = asyncio.run(asyncio.wait_for(run(), PATIENCE_S))
    assert sorted(done) == list(range(1, 8))
    (stuck,) = [f for f in failures if f.reason == "stuck"]
    assert (stuck.kind, stuck.match.index) == ("environment", 0)
    assert stuck.match.env in stuck.message
    assert "pool_test_games.py" in stuck.traceback
    assert {f.kind for f in failures if f is not stuck} <= {"infrastructure"}


def test_a_player_that_cannot_be_cancelled_loses_its_worker(runtime, tmp_path: Path) -> None:
    async def run():
        config = make_config(max_restarts=1, episode_timeout_s=0.5, request_timeout_s=0.2, grace_s=0.3)
        async with running_pool(config, runtime, tmp_path / "logs") as pool:
            return await play_all(pool, [make_match(0, player="deaf", time_s=0.2)])

    done, failures = asyncio.run(asyncio.wait_for(run(), PATIENCE_S))
    assert not done
    assert [(f.kind, f.reason) for f in failures] == [("environment", "stuck")]


def test_a_policy_server_that_never_answers_voids_the_episode_in_bounded_time(runtime, tmp_path: Path) -> None:
    async def run():
        async with serving(FakePolicy(runtime.endpoint("policy.sock"), manner="silent")) as policy:
            config = make_config(request_timeout_s=0.5, policy_endpoints=(policy.endpoint,))
            async with running_pool(config, runtime, tmp_path / "logs") as pool:
                return await play_all(pool, [make_match(0, player="talker")], replay=False)

    done, failures = asyncio.run(asyncio.wait_for(run(), PATIENCE_S))
    assert not done
    assert [(f.kind, f.reason) for f in failures] == [("infrastructure", "engine")]
    assert "policy server did not answer within 0." in failures[0].message


@pytest.mark.parametrize(
    ("manner", "kind", "says"),
    [
        ("unavailable", "infrastructure", "unavailable"),
        ("other_protocol", "infrastructure", f"protocol {PROTOCOL + 1}"),
        ("nan", "invalid", "not a finite number"),
    ],
)
def test_policy_servers_that_refuse_or_lie(manner, kind: str, says: str, runtime, tmp_path: Path) -> None:
    async def run():
        async with serving(FakePolicy(runtime.endpoint("policy.sock"), manner=manner)) as policy:
            config = make_config(request_timeout_s=1.0, policy_endpoints=(policy.endpoint,))
            async with running_pool(config, runtime, tmp_path / "logs") as pool:
                return await play_all(pool, [make_match(0, player="talker")], replay=False)

    _, failures = asyncio.run(asyncio.wait_for(run(), PATIENCE_S))
    assert [f.kind for f in failures] == [kind]
    assert says in failures[0].message


def test_workers_see_no_tokens(runtime, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HF_TOKEN", "WANDB_API_KEY", "AWS_SECRET_ACCESS_KEY", "SELFPLAY_API_KEY", "OPENAI_API_KEY"):
        monkeypatch.setenv(name, "canary-5417")

    async def environments(**changes) -> list[dict[str, str]]:
        async with running_pool(make_config(**changes), runtime, tmp_path / "logs") as pool:
            return [psutil.Process(pid).environ() for pid in pool.pids.values()]

    (plain,) = asyncio.run(environments())
    assert "canary-5417" not in plain.values()
    assert plain["OMP_NUM_THREADS"] == "1"
    (with_key,) = asyncio.run(environments(needs_api_key=True))
    assert [k for k, v in with_key.items() if v == "canary-5417"] == ["SELFPLAY_API_KEY"]


_PARENT = """
import asyncio, sys
from pathlib import Path
sys.path.insert(0, sys.argv[2])
from pool_site import make_config, make_match
from selfplay.pool import PoolSupervisor
from selfplay.process import RuntimeDir
from selfplay.wire.messages import PROTOCOL

async def main():
    runtime = RuntimeDir.create()
    pool = PoolSupervisor(make_config(workers=2), runtime=runtime, log_dir=Path(sys.argv[1]), say=print)
    await pool.start()
    await pool.submit(make_match(0, fault="busy", at=1, busy_s=2.0))
    print(runtime.path, *pool.pids.values(), flush=True)
    await asyncio.sleep(600)

asyncio.run(main())
"""


def test_nothing_is_left_when_the_parent_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(tmp_path / "site", monkeypatch)
    parent = subprocess.Popen(
        [sys.executable, "-c", _PARENT, str(tmp_path / "logs"), str(Path(__file__).parent)], stdout=subprocess.PIPE
    )
    assert parent.stdout is not None
    with parent.stdout:
        folder, *pids = parent.stdout.readline().decode().split()
    assert Path(folder).is_dir()
    assert len(pids) == 2
    parent.kill()
    parent.wait()
    deadline = time.monotonic() + PATIENCE_S
    while (any(psutil.pid_exists(int(p)) for p in pids) or Path(folder).exists()) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not Path(folder).exists()
    assert not any(psutil.pid_exists(int(p)) for p in pids)


def test_interrupts_from_the_terminal_do_not_end_workers(runtime, tmp_path: Path) -> None:
    async def run() -> None:
        async with running_pool(make_config(), runtime, tmp_path / "logs") as pool:
            for pid in pool.pids.values():
                os.kill(pid, signal.SIGINT)
            await pool.submit(make_match(0))
            assert isinstance(await pool.next_result(), EpisodeResult)

    asyncio.run(run())


def test_a_pool_closes_twice_and_after_a_failed_start(runtime, tmp_path: Path) -> None:
    async def run() -> None:
        pool = PoolSupervisor(make_config(), runtime=runtime, log_dir=tmp_path / "logs", say=print)
        await pool.close(1.0)
        await pool.close(1.0)

    asyncio.run(run())
