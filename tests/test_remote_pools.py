"""Pools of other processes: joining with keys, playing, leaving in every way, and what keeps a pool out. Real processes."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from tests.patience import PATIENCE_S

from fake_policy import FakePolicy, serving
from pool_site import install, make_match, play_all
from remote_site import PoolProcess, game_source, open_site, until
from selfplay.process import RuntimeDir


@pytest.fixture
def runtime(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[RuntimeDir]:
    install(tmp_path / "site", monkeypatch)
    runtime = RuntimeDir.create()
    yield runtime
    runtime.remove()


def test_a_pool_joins_plays_with_the_runs_models_and_leaves_at_will(runtime: RuntimeDir, tmp_path: Path) -> None:
    """Every match comes to its end once, whoever plays it; a pool told to leave first finishes what it holds."""

    async def run() -> None:
        source = game_source()
        async with (
            serving(FakePolicy(runtime.endpoint("policy.sock"))) as policy,
            open_site(tmp_path, runtime, source=source, engines=(policy.endpoint,), concurrency=1) as site,
        ):
            alice = await PoolProcess.start(site)
            await until(lambda: site.pool.num_free == 5)  # one slot here, four there
            done, failures = await play_all(site.pool, [make_match(i, player="talker", pin=7) for i in range(40)])
            assert sorted(done) == list(range(40))
            assert failures == []
            told = site.pool.who_played()
            assert told["remote_share"] == told["remote_games"] / 40
            assert told["remote_episodes_per_s"] > 0
            assert told.items() >= {"workers": 1, "slots": 1, "remote_pools": 1, "remote_slots": 4, "games": 40}.items()
            await until(lambda: set(policy.ended) == {f"{i}.0" for i in range(40)})  # no version stays pinned
            code, out = await alice.end((signal.SIGINT,))
            assert code == 0
            assert "alice-1 left: it was told to leave" in out
            assert "joined tcp://127.0.0.1:" in out
            await until(lambda: not site.gateway.names)
            (left,) = [line for line in site.said if "left" in line]
            assert left.startswith("remote pool alice-1 left after ")
            assert int(left.split("after ")[1].split()[0]) == told["remote_games"]
            assert 0 < told["remote_games"] < 40  # some there, some here
            more, _ = await play_all(site.pool, [make_match(i) for i in range(40, 44)])
            assert sorted(more) == [40, 41, 42, 43]
            told = site.pool.who_played()
            assert told.items() >= {"remote_pools": 0, "remote_slots": 0, "games": 4, "remote_games": 0}.items()

    asyncio.run(run())


def test_what_a_killed_pool_held_is_played_again(runtime: RuntimeDir, tmp_path: Path) -> None:
    async def run() -> None:
        source = game_source()
        async with (
            serving(FakePolicy(runtime.endpoint("policy.sock"), delay_s=0.05)) as policy,
            open_site(
                tmp_path, runtime, source=source, engines=(policy.endpoint,), concurrency=1, silence_s=2.0
            ) as site,
        ):
            alice = await PoolProcess.start(site)
            await until(lambda: site.pool.num_free == 5)
            playing = asyncio.create_task(play_all(site.pool, [make_match(i, player="talker") for i in range(16)]))
            await until(lambda: sum(h.worker == "alice-1" for h in site.pool.in_flight) == 4)
            workers = psutil.Process(alice.process.pid).children(recursive=True)
            held = {h.episode_id for h in site.pool.in_flight if h.worker == "alice-1"}
            alice.process.kill()
            done, failures = await playing
            assert sorted(done) == list(range(16))
            assert {(f.kind, f.reason) for f in failures} == {("infrastructure", "pool left")}
            assert {f.match.episode_id for f in failures} <= held
            assert "nothing was heard of it for 2 s" in failures[0].message
            await until(lambda: not policy.active)  # nobody generates for the dead
            await alice.end()
            psutil.wait_procs(workers, timeout=PATIENCE_S)
            assert not any(w.is_running() for w in workers)

    asyncio.run(run())


def test_a_second_interrupt_leaves_at_once(runtime: RuntimeDir, tmp_path: Path) -> None:
    async def run() -> None:
        source = game_source()
        async with (
            serving(FakePolicy(runtime.endpoint("policy.sock"), manner="silent")) as policy,
            open_site(tmp_path, runtime, source=source, engines=(policy.endpoint,), concurrency=1) as site,
        ):
            alice = await PoolProcess.start(site)
            await until(lambda: site.pool.num_free == 5)
            for i in range(5):
                await site.pool.submit(make_match(i, player="talker"))
            await until(lambda: len(policy.active) == 5)
            alice.process.send_signal(signal.SIGTERM)
            await alice.until("finishing the games under way")
            code, out = await alice.end((signal.SIGTERM,))
            assert code == 0
            assert "told to leave" in out
            results = [await site.pool.next_result() for _ in range(4)]
            assert {r.reason for r in results} == {"pool left"}  # type: ignore[union-attr]
            await until(lambda: len(policy.active) == 1)

    asyncio.run(run())


def test_who_is_kept_out_and_what_they_are_told(runtime: RuntimeDir, tmp_path: Path) -> None:
    async def run() -> None:
        async with open_site(tmp_path, runtime) as site:
            starts = {
                "does not know this pool's key": PoolProcess.start(site, "mallory"),
                "the key given with --server is not its own": PoolProcess.start(
                    site, server=tmp_path / "keys/mallory.key", wait="3"
                ),
                "of-this-game, the pool has pool-test-games 1.0 sha256:": PoolProcess.start(site),
                "the run plays pool-test-v0, the pool pool-test-stuck-v0": PoolProcess.start(
                    site, env="pool-test-stuck-v0"
                ),
            }
            pools = [await start for start in starts.values()]
            for says, pool in zip(starts, pools, strict=True):
                code, out = await pool.end()
                assert says in out
                assert code == 2
                assert out.startswith("selfplay: ")
                assert out.count("\n") == 1
            assert site.gateway.names == ()
            assert any("unknown key" in line and str(site.keys.allowed) in line for line in site.said)
            assert not any("joined" in line for line in site.said)

    asyncio.run(run())
