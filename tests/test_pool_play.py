"""Environment pools that work: real worker processes, a policy server without a model."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path

import pytest
from tests.patience import PATIENCE_S

from fake_policy import FakePolicy, serving
from pool_site import install, make_config, make_match, play_all, running_pool
from selfplay.config import Config
from selfplay.launch.plan import one_at_a_time
from selfplay.pool import EpisodeResult, FailedResult
from selfplay.process import RuntimeDir
from selfplay.registry import describe
from selfplay.types import Episode
from selfplay.wire.codec import Codec


@pytest.fixture
def runtime(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    install(tmp_path / "site", monkeypatch)
    runtime = RuntimeDir.create()
    yield runtime
    runtime.remove()


def transcripts(done: dict[int, EpisodeResult]) -> dict[int, list[tuple[str, str, tuple[int, ...]]]]:
    return {i: [(t.seat, t.text, t.sampled_ids) for t in r.episode.turns] for i, r in done.items()}


@pytest.mark.parametrize("player", ["mute", "talker"])
def test_the_same_matches_give_the_same_transcripts_at_any_concurrency(player: str, runtime, tmp_path: Path) -> None:
    async def played(concurrency: int, workers: int):
        async with serving(FakePolicy(runtime.endpoint("policy.sock"))) as policy:
            config = make_config(concurrency=concurrency, workers=workers, policy_endpoints=(policy.endpoint,))
            async with running_pool(config, runtime, tmp_path / "logs") as pool:
                done, failures = await play_all(pool, [make_match(i, player=player) for i in range(32)])
                assert not failures
                assert pool.num_free == concurrency * workers
                assert pool.counts["delivered"] == pool.counts["granted"] == 32
                return done

    alone, together = asyncio.run(played(1, 1)), asyncio.run(played(32, 2))
    assert transcripts(alone) == transcripts(together)
    assert len({str(t) for t in transcripts(alone).values()}) == 32


def test_an_episode_arrives_whole_and_its_bytes_are_what_was_checked(runtime, tmp_path: Path) -> None:
    async def run() -> EpisodeResult:
        async with serving(FakePolicy(runtime.endpoint("policy.sock"))) as policy:
            config = make_config(policy_endpoints=(policy.endpoint,))
            async with running_pool(config, runtime, tmp_path / "logs") as pool:
                done, _ = await play_all(pool, [make_match(3, player="talker", pin=7)])
                for _ in range(100):
                    if policy.ended:
                        break
                    await asyncio.sleep(0.02)
                assert policy.ended == ["3.0"]
                return done[3]

    result = asyncio.run(run())
    assert Codec(Episode).decode(result.data) == result.episode
    assert result.episode.match == make_match(3, player="talker", pin=7)
    assert result.episode.env_source.startswith("pool-test-games 1.0 sha256:")
    assert result.episode.versions() == {"agent-a": (7, 7), "agent-b": (7, 7)}


def test_the_end_of_an_episode_is_said_only_where_a_version_may_be_held(runtime, tmp_path: Path) -> None:
    """Match 0 asks for the current version at each turn, match 1 for one of its own and match 2 for number 7."""

    async def run() -> list[str]:
        async with serving(FakePolicy(runtime.endpoint("policy.sock"))) as policy:
            config = make_config(policy_endpoints=(policy.endpoint,))
            async with running_pool(config, runtime, tmp_path / "logs") as pool:
                for i, pin in enumerate(("turn", "episode", 7)):
                    await play_all(pool, [make_match(i, player="talker", pin=pin)])
                while len(policy.ended) < 2:
                    await asyncio.sleep(0.02)
                return policy.ended

    assert asyncio.run(run()) == ["1.0", "2.0"]


def test_a_game_of_which_a_process_holds_one_is_played_one_at_a_time(runtime, tmp_path: Path) -> None:
    game = str(Path(__file__).with_name("faulty_game.py"))
    said: list[str] = []
    spec = describe(game, {"kind": "alone"})
    config = one_at_a_time(Config(env=game), spec, said.append)
    assert config.rollout.concurrency == 1
    assert "one game at a time in each of 1 workers" in said[0]

    async def run() -> None:
        pool_config = make_config(concurrency=config.rollout.concurrency)
        async with running_pool(pool_config, runtime, tmp_path / "logs") as pool:
            done, failures = await play_all(
                pool, [make_match(i, player="random", env=game, kind="alone") for i in range(8)]
            )
            assert (len(done), failures) == (8, [])

    asyncio.run(asyncio.wait_for(run(), PATIENCE_S))


def test_a_late_acknowledgement_costs_nothing_and_doubles_nothing(runtime, tmp_path: Path) -> None:
    """The worker sends its result again and again; the controller sees it once, before and after the ack."""

    async def run() -> None:
        async with running_pool(make_config(resend_s=0.05), runtime, tmp_path / "logs") as pool:
            await pool.submit(make_match(0))
            assert isinstance(await pool.next_result(), EpisodeResult)
            while pool.counts.get("duplicate", 0) < 2:
                await asyncio.sleep(0.02)
            await pool.ack("0.0")
            await pool.submit(make_match(1))
            assert (await pool.next_result()).match.index == 1
            await pool.ack("1.0")

    asyncio.run(run())


def test_cancelled_episodes_stop_generating(runtime, tmp_path: Path) -> None:
    async def run() -> None:
        async with serving(FakePolicy(runtime.endpoint("policy.sock"), manner="silent")) as policy:
            config = make_config(concurrency=20, policy_endpoints=(policy.endpoint,))
            async with running_pool(config, runtime, tmp_path / "logs") as pool:
                for i in range(20):
                    await pool.submit(make_match(i, player="talker"))
                while len(policy.active) < 20:
                    await asyncio.sleep(0.02)
                assert {h.episode_id for h in pool.in_flight} == {f"{i}.0" for i in range(20)}
                for i in range(20):
                    await pool.cancel(f"{i}.0")
                results = [await pool.next_result() for _ in range(20)]
                assert {r.kind for r in results if isinstance(r, FailedResult)} == {"cancelled"}
                while policy.active:
                    await asyncio.sleep(0.02)
                assert pool.num_free == 20

    asyncio.run(asyncio.wait_for(run(), PATIENCE_S))


def test_an_episode_that_times_out_withdraws_its_request_and_is_truncated(runtime, tmp_path: Path) -> None:
    async def run() -> None:
        async with serving(FakePolicy(runtime.endpoint("policy.sock"), manner="silent")) as policy:
            config = make_config(policy_endpoints=(policy.endpoint,))
            async with running_pool(config, runtime, tmp_path / "logs") as pool:
                done, _ = await play_all(pool, [make_match(0, player="talker", time_s=0.3)])
                assert done[0].episode.ended == "truncated"
                while policy.active:
                    await asyncio.sleep(0.02)

    asyncio.run(asyncio.wait_for(run(), PATIENCE_S))


def test_closing_the_pool_withdraws_what_its_workers_had_asked_for(runtime, tmp_path: Path) -> None:
    async def run() -> None:
        async with serving(FakePolicy(runtime.endpoint("policy.sock"), manner="silent")) as policy:
            config = make_config(policy_endpoints=(policy.endpoint,))
            async with running_pool(config, runtime, tmp_path / "logs") as pool:
                await pool.submit(make_match(0, player="talker"))
                while not policy.active:
                    await asyncio.sleep(0.02)
            while policy.active:
                await asyncio.sleep(0.02)

    asyncio.run(asyncio.wait_for(run(), PATIENCE_S))


def test_jumps_of_the_wall_clock_reap_no_worker(runtime, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import time

    real = time.time
    offsets = iter([3600.0, -3600.0] * 100_000)
    monkeypatch.setattr(time, "time", lambda: real() + next(offsets))

    async def run() -> None:
        async with running_pool(make_config(workers=2), runtime, tmp_path / "logs") as pool:
            done, failures = await play_all(pool, [make_match(i) for i in range(40)])
            assert len(done) == 40
            assert not failures
            assert pool.num_restarts == 0
            assert all(h.age_s >= 0 for h in pool.in_flight)
            assert all(r.episode.duration_s >= 0 for r in done.values())

    asyncio.run(run())


def test_workers_import_neither_torch_nor_transformers_nor_vllm() -> None:
    code = (
        "import sys, selfplay.pool.worker, selfplay.play, selfplay.registry\n"
        "heavy = {'torch', 'transformers', 'vllm', 'ray', 'numpy', 'peft'} & set(sys.modules)\n"
        "sys.exit(f'a worker imports {heavy}' if heavy else 0)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("name", ["with space", "mit Ümlaut und 汉字", "x" * 120])
def test_odd_and_long_folders(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Logs may lie anywhere; sockets find a place with a short path by themselves."""
    odd = tmp_path / name
    odd.mkdir()
    install(tmp_path / "site", monkeypatch)
    monkeypatch.setenv("TMPDIR", str(odd))
    runtime = RuntimeDir.create()

    async def run() -> None:
        async with running_pool(make_config(), runtime, odd / "logs") as pool:
            done, _ = await play_all(pool, [make_match(0)])
            assert done

    try:
        asyncio.run(run())
        assert list((odd / "logs").iterdir())
    finally:
        runtime.remove()
