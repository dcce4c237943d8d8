"""What becomes of results: stored once and acknowledged, put aside by reason, played again, or the end of the run."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from episode_samples import encode, episode
from selfplay.buffer import EpisodeBuffer
from selfplay.controller.collector import Collector
from selfplay.controller.memory import Memory
from selfplay.controller.scoring_stage import ScoringStage
from selfplay.controller.waits import Waits
from selfplay.errors import StalledError, WorkerError
from selfplay.pool import EpisodeResult, FailedResult
from selfplay.scoring import Panel
from selfplay.store.adapters import AdapterStore
from selfplay.store.episode_log import EpisodeLog
from selfplay.store.state import PendingMatch, RunState


class Pool:
    """Hands out the results it was made with, and writes down what was acknowledged."""

    def __init__(self, *results: Any) -> None:
        self.results, self.acked = list(results), list[str]()

    async def next_result(self) -> Any:
        while not self.results:
            await asyncio.sleep(3600)
        return self.results.pop(0)

    def ready_results(self, limit: int) -> list[Any]:
        ready, self.results = self.results[:limit], self.results[limit:]
        return ready

    async def ack(self, episode_id: str) -> None:
        self.acked.append(episode_id)


class Said:
    def __init__(self) -> None:
        self.events: list[str] = []

    def event(self, text: str) -> None:
        self.events.append(text)


class Site:
    def __init__(self, place: Path, *results: Any, room: int = 10**6, starved: bool = False, batch: int = 2) -> None:
        place.mkdir(exist_ok=True)
        self.pool, self.said, waits = Pool(*results), Said(), Waits()
        self.log = EpisodeLog.open(place / "episodes", write=True, say=lambda _: None)
        self.memory = Memory(
            state=RunState(step=0, versions={"pro": 0, "con": 0}), log=self.log, store=AdapterStore(place),
            buffer=EpisodeBuffer(max_episodes=100, max_bytes=room),
        )  # fmt: skip
        for result in results:
            self.memory.ledger.start(result.match.episode_id)
            self.memory.began_with[PendingMatch(result.match.index, result.match.attempt)] = {"pro": 0, "con": 0}
        scoring = ScoringStage(
            Panel({}), {}, memory=self.memory, waits=waits, log=None, say=self.said.event, max_failures=3
        )
        collector: dict[str, Any] = {
            "pool": self.pool, "log": self.log, "league": None, "memory": self.memory, "observer": self.said,
            "reward_range": (-1.0, 1.0), "batch": batch, "max_failures": 3, "waits": waits, "scoring": scoring,
            "starved": lambda: starved,
        }  # fmt: skip
        self.collector = Collector(**collector)

    def run(self, seconds: float = 0.3) -> Site:
        async def work() -> None:
            task = asyncio.create_task(self.collector.run())
            await asyncio.wait([task], timeout=seconds)
            if task.done():
                task.result()
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

        try:
            asyncio.run(work())
        finally:
            self.log.close()
        return self


def done(index: int, **changes: Any) -> EpisodeResult:
    e = episode(index, **changes)
    return EpisodeResult(match=e.match, episode=e, data=encode(e))


def failed(index: int, kind: Any, reason: str) -> FailedResult:
    return FailedResult(match=episode(index).match, kind=kind, reason=reason, message="boom", traceback="line 1")


def test_sound_episodes_are_durable_before_they_are_acknowledged(tmp_path: Path) -> None:
    site = Site(tmp_path, done(0), done(1)).run()
    assert site.pool.acked == ["0.0", "1.0"]
    assert site.memory.buffer.seqs == (0, 1)
    assert site.memory.began_with == {}
    assert site.memory.generated.figures()["num"] == 2
    with EpisodeLog.open(tmp_path / "episodes", write=False, say=lambda _: None) as log:
        assert [e.episode_id for _, e in log.episodes()] == ["0.0", "1.0"]


def test_what_was_cancelled_for_a_new_version_is_played_again_and_no_failure(tmp_path: Path) -> None:
    site = Site(tmp_path, *(failed(i, "cancelled", "cancelled") for i in range(6))).run()
    assert site.memory.ledger.check(in_flight=0).dropped == {"cancelled at a new version": 6}
    assert site.memory.replays == [PendingMatch(i, 1) for i in range(6)]
    assert site.said.events == []


def test_infrastructure_is_played_again_and_a_raising_game_is_not(tmp_path: Path) -> None:
    site = Site(tmp_path, failed(0, "infrastructure", "engine"), failed(1, "environment", "raised")).run()
    report = site.memory.ledger.check(in_flight=0)
    assert (report.void, report.failed) == ({"engine": 1}, {"raised": 1})
    assert site.memory.replays == [PendingMatch(0, 1)]


@pytest.mark.parametrize("reason", ["worker lost", "pool left", "pool fault"])
def test_whoever_goes_away_with_many_games_does_not_end_the_run(tmp_path: Path, reason: str) -> None:
    site = Site(tmp_path, *(failed(i, "infrastructure", reason) for i in range(9)), done(9)).run()
    assert site.memory.ledger.check(in_flight=0, waiting=1).void == {reason: 9}
    assert site.memory.replays == [PendingMatch(i, 1) for i in range(9)]
    assert site.pool.acked == [f"{i}.0" for i in range(10)]


def test_a_missing_reward_puts_one_episode_aside_and_spoils_no_other(tmp_path: Path) -> None:
    bad = done(1, rewards={"pro": float("nan"), "con": 0.0})
    site = Site(tmp_path, done(0), bad, done(2)).run()
    assert site.memory.ledger.check(waiting=2).dropped == {"non-finite reward": 1}
    assert sorted(site.pool.acked) == ["0.0", "1.0", "2.0"]


def test_when_every_game_fails_the_run_ends_with_the_last_ones_traceback(tmp_path: Path) -> None:
    site = Site(tmp_path, *(failed(i, "environment", "raised") for i in range(9)))
    with pytest.raises(WorkerError, match=r"4 episodes in a row failed \(rollout.max_failures=3\).*\n.*line 1"):
        site.run()


def test_a_full_buffer_holds_the_workers_back_or_ends_a_run_that_cannot_go_on(tmp_path: Path) -> None:
    room = len(done(0).data)
    waiting = Site(tmp_path / "a", done(0), done(1), room=room).run()
    assert waiting.pool.acked == ["0.0"], "the second stays with its worker"
    with pytest.raises(StalledError, match="the buffer is full with 1 episodes"):
        Site(tmp_path / "b", done(0), done(1), room=room, starved=True).run()
