"""The scoring stage: a slow scorer delays its episodes and nobody else's; failures are counted; nothing piles up."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

from episode_samples import encode, episode
from selfplay.buffer import EpisodeBuffer
from selfplay.config.schema import ScorerConfig
from selfplay.controller.memory import Memory
from selfplay.controller.scoring_stage import ScoringStage
from selfplay.controller.waits import Waits
from selfplay.errors import StoreError, WorkerError
from selfplay.scoring import Panel, ScorerContext, Scores
from selfplay.store.adapters import AdapterStore
from selfplay.store.episode_log import EpisodeLog
from selfplay.store.score_log import ScoreLog
from selfplay.store.state import RunState
from selfplay.types import Episode


class ByIndex:
    """Behaves by the number of the episode: a value is a reward, an exception is raised, an event is waited for."""

    def __init__(self, behaviour: dict[int, Any]) -> None:
        self.behaviour, self.running, self.most = behaviour, 0, 0

    async def score(self, episode: Episode, context: ScorerContext) -> Scores:
        self.running += 1
        self.most = max(self.most, self.running)
        try:
            what = self.behaviour.get(episode.match.index, 0.0)
            if isinstance(what, Exception):
                raise what
            if isinstance(what, asyncio.Event):
                await what.wait()
                what = 7.0
            await asyncio.sleep(0)
            return Scores(rewards={"pro": what})
        finally:
            self.running -= 1


class Site:
    def __init__(self, place: Path, scorers: dict[str, tuple[Any, ScorerConfig]], max_failures: int = 3) -> None:
        log = EpisodeLog.open(place / "episodes", write=True, say=lambda _: None)
        self.buffer, self.said, self.waits = EpisodeBuffer(max_episodes=100, max_bytes=10**9), list[str](), Waits()
        state = RunState(step=0, versions={"pro": 0, "con": 0})
        self.memory = Memory(state=state, buffer=self.buffer, log=log, store=AdapterStore(place), scored=True)
        self.stage = ScoringStage(
            Panel(scorers), dict.fromkeys(scorers), memory=self.memory, waits=self.waits, log=self.open_scores(place),  # type: ignore[arg-type]
            say=self.said.append, max_failures=max_failures,
        )  # fmt: skip
        self.log = log

    def open_scores(self, place: Path) -> ScoreLog:
        self.scores = ScoreLog.open(place / "scores", write=True, say=self.said.append)
        return self.scores

    def store(self, *indices: int) -> None:
        for i in indices:
            e = episode(i)
            self.memory.ledger.start(e.episode_id)
            self.memory.ledger.store(e.episode_id)
            self.buffer.put(i, encode(e), e, ready=False)
            self.stage.submit(i, e)

    async def until(self, what: Callable[[], bool]) -> None:
        async with asyncio.timeout(5):
            await self.waits.until("the test", what)


def run(
    place: Path,
    scorers: dict[str, Any],
    play: Callable[[Site], Coroutine[Any, Any, None]],
    before: Callable[[Site], None] = lambda _: None,
    settings: dict[str, Any] | None = None,
    **more: Any,
) -> Site:
    async def work() -> Site:
        site = Site(
            place,
            {n: (s, ScorerConfig(concurrency=2, timeout_s=0.5, **(settings or {}))) for n, s in scorers.items()},
            **more,
        )
        before(site)
        stage = asyncio.create_task(site.stage.run())
        try:
            playing = asyncio.create_task(play(site))
            await asyncio.wait([stage, playing], return_when=asyncio.FIRST_COMPLETED)
            if stage.done():
                stage.result()
            await playing
        finally:
            stage.cancel()
            await asyncio.gather(stage, return_exceptions=True)
            site.log.close()
            site.scores.close()
        return site

    return asyncio.run(work())


def test_a_slow_scorer_delays_its_episodes_and_not_the_others(tmp_path: Path) -> None:
    release = asyncio.Event()
    quick, slow = ByIndex({}), ByIndex({0: release})

    async def play(site: Site) -> None:
        site.store(0, 1, 2, 3, 4)
        await site.until(lambda: site.buffer.num_unready == 1)
        assert set(site.buffer.staleness({"pro": 0, "con": 0})) == {1, 2, 3, 4}
        assert site.memory.in_flight_staleness() == [0], "what is being scored is still on its way to the trainer"
        with pytest.raises(ValueError, match="holds 4 that are ready"):
            site.buffer.take(5, {"pro": 0, "con": 0})
        assert site.stage.figures()["slow"]["waiting"] == 1
        release.set()
        await site.until(lambda: site.buffer.num_unready == 0)
        assert [s.rewards for s, _ in site.memory.scores[0]] == [{"pro": 0.0}, {"pro": 7.0}]

    run(tmp_path, {"quick": quick, "slow": slow}, play)
    assert slow.most == 2, "its own concurrency"


def test_what_cannot_be_scored_is_dropped_by_reason_and_said(tmp_path: Path) -> None:
    never = asyncio.Event()

    async def play(site: Site) -> None:
        site.store(0, 1, 2, 3)
        await site.until(lambda: site.buffer.num_unready == 0)
        assert site.buffer.seqs == (0, 3)
        assert site.memory.ledger.check(waiting=len(site.buffer)).dropped == {"scorer failed": 2}

    site = run(tmp_path, {"moody": ByIndex({1: ValueError("no idea"), 2: never})}, play)
    assert sorted(site.said) == [
        "episode 1.0 dropped, scorer moody: ValueError: no idea",
        "episode 2.0 dropped, scorer moody: no answer within 0.5 s",
    ]


def restore(*indices: int) -> Callable[[Site], None]:
    """The buffer of a resumed run."""

    def put(site: Site) -> None:
        for i in indices:
            site.buffer.put(i, encode(episode(i)), episode(i), ready=False)

    return put


async def until_scored(site: Site) -> None:
    await site.until(lambda: site.buffer.num_unready == 0)


def rewards(site: Site, scorer: int = 0) -> dict[int, float]:
    return {seq: said[scorer][0].rewards["pro"] for seq, said in site.memory.scores.items()}


def test_what_was_said_once_stands_after_a_resume_and_only_what_is_missing_is_asked_for(tmp_path: Path) -> None:
    """The first process ends while one scorer is still thinking of the second episode."""
    never = asyncio.Event()

    async def play(site: Site) -> None:
        site.store(3, 5)
        await site.until(lambda: site.buffer.num_unready == 1)

    first = run(tmp_path, {"jury": ByIndex({3: 0.25, 5: 0.5}), "slow": ByIndex({3: 2.0, 5: never})}, play)
    assert rewards(first) == {3: 0.25}

    again = {"jury": ByIndex({3: -9.0, 5: -9.0, 6: 0.75}), "slow": ByIndex({3: -9.0, 5: 3.0, 6: 4.0})}
    second = run(tmp_path, again, until_scored, before=restore(3, 5, 6))
    assert (rewards(second, 0), rewards(second, 1)) == ({3: 0.25, 5: 0.5, 6: 0.75}, {3: 2.0, 5: 3.0, 6: 4.0})
    assert [int(c["scored"]) for c in second.stage.figures().values()] == [1, 2]
    assert "3 of the 6 scores of the episodes that wait are in the log" in second.said[0]


def test_a_scorer_that_is_asked_with_other_settings_is_asked_again(tmp_path: Path) -> None:
    kinds = [
        {"options": {"question": "who won?"}},
        {"options": {"question": "who lost?"}},
        {"options": {"question": "who won?"}, "weight": 3.0},
    ]
    seen = []
    for i, changes in enumerate(kinds):
        scorers = {"jury": ByIndex({0: float(i)})}
        site = run(tmp_path, scorers, until_scored, before=restore(0), settings=changes)
        seen.append((rewards(site)[0], site.memory.scores[0][0][1]))
    assert seen == [(0.0, 1.0), (1.0, 1.0), (0.0, 3.0)]


def test_a_log_of_scores_that_is_something_else_is_refused(tmp_path: Path) -> None:
    with ScoreLog.open(tmp_path / "scores", write=True, say=print) as log:
        log.append(encode(episode(0)))
        with pytest.raises(StoreError, match="record 0 is not a score"):
            log.known({"0.0"}, {})


def test_a_scorer_that_always_fails_ends_the_run(tmp_path: Path) -> None:
    async def play(site: Site) -> None:
        site.store(*range(6))
        await asyncio.sleep(5)

    bad = ByIndex({i: RuntimeError("broken") for i in range(6)})
    with pytest.raises(BaseExceptionGroup) as error:
        run(tmp_path, {"bad": bad}, play)
    assert error.group_contains(WorkerError, match=r"4 episodes in a row could not be scored .*max_failures=3.*broken")


def test_an_episode_that_got_too_old_meanwhile_is_counted_once(tmp_path: Path) -> None:
    release = asyncio.Event()

    async def play(site: Site) -> None:
        site.store(0, 1)
        await site.until(lambda: site.buffer.num_unready == 1)
        site.memory.versions["pro"] = 5
        assert site.memory.discard_stale(2) == 2
        release.set()
        await site.until(lambda: site.stage.figures()["slow"]["scored"] == 2)
        assert site.memory.scores == {}
        assert site.memory.ledger.check(waiting=0).dropped == {"too stale": 2}

    run(tmp_path, {"slow": ByIndex({0: release})}, play)
