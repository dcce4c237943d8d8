"""A worker that is frozen while many versions come: it needs no news, and every answer is of the version that it names."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import psutil
import pytest
from tests.patience import PATIENCE_S
from tests.policy_samples import adapter_config
from tests.policy_served import Served, served

from pool_site import install, make_config, make_match, running_pool
from selfplay.agent import Sampling
from selfplay.policy.fake import scribble
from selfplay.pool import EpisodeResult
from selfplay.types import Episode
from selfplay.wire.messages import BucketHeader, Hold, Release

NEWEST, GAMES, TURNS = 50, 4, 12
AGENTS = ("agent-a", "agent-b")
SAMPLING = Sampling(max_tokens=16)
HEADER = BucketHeader(
    transport="shm", address="x", offset=0, num_bytes=4, crc32=0, dtype="float32", layout=(("x", (1,), 0),),
    adapter_config=adapter_config(),
)  # fmt: skip


async def announce(server: Served, number: int) -> None:
    """Version ``number`` of both agents is current, and the one before is retired."""
    for agent in AGENTS:
        await server.install(f"{agent}@{number}", HEADER)
        if number:
            await server.retire(f"{agent}@{number - 1}")


def versions(episode: Episode) -> list[int]:
    """The version of each turn, which must be the one that the engine answered with: its words tell."""
    found = []
    for turn in episode.turns:
        (span,) = turn.spans
        said = scribble(turn.prompt_ids, f"{turn.agent}@{span.version}", SAMPLING)
        assert turn.sampled_ids == tuple(said)
        found.append(span.version)
    return found


def test_a_frozen_worker_wakes_on_the_newest_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(tmp_path / "site", monkeypatch)

    async def play(server: Served) -> list[Episode]:
        await announce(server, 0)
        config = make_config(concurrency=GAMES, policy_endpoints=(server.config.address,), sampling=SAMPLING)
        async with running_pool(config, server.runtime, tmp_path / "logs") as pool:
            # One seat has answered in every game and the other waits, however fast or slow anybody is.
            await server.call(Hold, agents=("agent-b",), abort=False, timeout_s=5.0, lease_s=PATIENCE_S)
            for i in range(GAMES):
                await pool.submit(make_match(i, player="talker", turns=TURNS))
            while (await server.stats())["requests"] < GAMES:
                await asyncio.sleep(0.01)
            (pid,) = pool.pids.values()
            os.kill(pid, signal.SIGSTOP)
            while psutil.Process(pid).status() != psutil.STATUS_STOPPED:
                await asyncio.sleep(0.01)
            for number in range(1, NEWEST + 1):
                await announce(server, number)
            os.kill(pid, signal.SIGCONT)
            await server.call(Release)
            results = [await asyncio.wait_for(pool.next_result(), PATIENCE_S) for _ in range(GAMES)]
            for result in results:
                await pool.ack(result.match.episode_id)
            assert pool.num_restarts == 0
        return [r.episode for r in results if isinstance(r, EpisodeResult)]

    with served(tmp_path, engine="fake") as server:
        episodes = server.run(asyncio.wait_for(play(server), PATIENCE_S))
    assert [versions(e) for e in episodes] == [[0] + [NEWEST] * (TURNS - 1)] * GAMES
