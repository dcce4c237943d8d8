"""Publishing a version: order of events, failures, and the probe."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from selfplay.config import load_config
from selfplay.controller.policy_link import NotNow
from selfplay.controller.publisher import Manner, Publisher, all_or_first_error
from selfplay.errors import SyncError, TrainerError
from selfplay.types import PolicyVersion
from selfplay.wire.messages import BucketHeader, Exported, Sent

HEADER = BucketHeader(
    transport="shm", address="", offset=0, num_bytes=8, crc32=1, dtype="float32", layout=(), adapter_config={}
)  # fmt: skip


class Diary:
    """What happened, in order, on both sides."""

    def __init__(self) -> None:
        self.lines: list[str] = []


class FakeTrainer:
    def __init__(
        self, diary: Diary, logprobs: tuple[float, ...] = (-1.0, -2.0), send_error: Exception | None = None
    ) -> None:
        self.diary, self.logprobs, self.send_error = diary, logprobs, send_error
        self.is_lost, self.send_failures = False, 0
        """How many sends fail before one succeeds."""

    async def join_weights(self, make: Any, timeout_s: float) -> None:
        self.diary.lines.append(f"join {make(1).address}")

    async def export(self, make: Any, timeout_s: float) -> Exported:
        self.diary.lines.append(f"export {make(1).version}")
        return Exported(request=1, header=HEADER)

    async def send(self, make: Any, timeout_s: float) -> Sent:
        self.diary.lines.append("send")
        if self.send_error is not None:
            raise self.send_error
        if self.send_failures:
            self.send_failures -= 1
            raise SyncError("a receiver did not take part within 5 s")
        return Sent(request=2, digest="d")

    async def probe(self, agent: str, ids: tuple[int, ...], timeout_s: float) -> tuple[float, ...]:
        return self.logprobs


class FakeEngine:
    def __init__(
        self, diary: Diary, name: str = "e", logprobs: tuple[float, ...] = (-1.0, -2.0), hang: bool = False
    ) -> None:
        self.diary, self.name, self.logprobs, self.hang = diary, name, logprobs, hang
        self.is_lost, self.refuses = False, ""
        """A call that is refused, as often as `num_refusals` says."""
        self.num_refusals = 10**9
        self.num_full = 0
        """How many times there is no room for a version yet."""

    async def join_weights(self, make: Any, timeout_s: float) -> None:
        self.diary.lines.append(f"{self.name} join {make(1).address} as {make(1).rank} of {make(1).world_size}")

    async def hold(self, agents: tuple[str, ...], **_: Any) -> dict[str, float]:
        self.diary.lines.append(f"{self.name} hold {', '.join(agents) or 'everybody'}")
        self._refuse(f"hold {', '.join(agents)}")
        return {"under_way": 2.0}

    def _refuse(self, call: str) -> None:
        if self.refuses == call and self.num_refusals:
            self.num_refusals -= 1
            raise SyncError(f"{self.name} refused")

    async def release(self, timeout_s: float) -> None:
        self.diary.lines.append(f"{self.name} release")

    def __getattr__(self, call: str) -> Any:
        async def record(version: PolicyVersion, *_: Any) -> Any:
            self.diary.lines.append(f"{self.name} {call} {version}")
            self._refuse(f"{call} {version}")
            if call == "begin_install" and self.num_full:
                self.num_full -= 1
                raise NotNow("no room")
            if call == "commit_install" and self.hang:
                await asyncio.sleep(3600)
            return self.logprobs if call == "probe" else {"swapped": 1.0} if call == "make_current" else {}

        return record


def publisher(trainer: FakeTrainer, *engines: FakeEngine, keep: int = 2, **changes: Any) -> Publisher:
    fields: dict[str, Any] = {
        "trainer": trainer, "engines": engines, "transport": "shm", "address": "weights", "adapters": Path("adapters"),
        "probe_ids": (1, 2, 3), "probe_bound": 0.01, "timeout_s": 5.0, "keep": keep,
    }  # fmt: skip
    return Publisher(**fields | changes)


def test_current_only_after_every_engine_has_committed_and_proven_itself() -> None:
    diary = Diary()
    report = asyncio.run(
        publisher(FakeTrainer(diary), FakeEngine(diary, "a"), FakeEngine(diary, "b")).publish(PolicyVersion("pro", 1))
    )
    order = {line: i for i, line in enumerate(diary.lines)}
    first_current = min(order[f"{e} make_current pro@1"] for e in "ab")
    for e in "ab":
        assert order[f"{e} begin_install pro@1"] < order["send"]
        assert order[f"{e} commit_install pro@1"] < order[f"{e} probe pro@1"] < first_current
    assert (report.probe_mean, report.probe_max, report.num_bytes) == (0.0, 0.0, 8)


@pytest.mark.parametrize("ends", [True, False])
def test_where_games_hold_all_the_room_the_version_waits_for_one_to_end(
    ends: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("selfplay.controller.publisher.ROOM_EVERY_S", 0.001)
    diary, said = Diary(), list[str]()
    full, free = FakeEngine(diary, "full"), FakeEngine(diary, "free")
    full.num_full = 3 if ends else 10**9
    manner = Manner(room_s=60.0 if ends else 0.01)
    work = publisher(FakeTrainer(diary), full, free, manner=manner, say=said.append).publish(PolicyVersion("pro", 1))
    if ends:
        asyncio.run(work)
        assert diary.lines.index("send") > diary.lines.index("full begin_install pro@1")
    else:
        with pytest.raises(SyncError, match=r"pro@1 did not reach the engines .*no room"):
            asyncio.run(work)
        assert "send" not in diary.lines
        assert "free abort_install pro@1" in diary.lines
    assert said == ["pro@1 waits for games to let go of older versions: no room"]


def test_a_failed_send_is_given_up_everywhere_at_once_and_the_old_version_stays() -> None:
    diary = Diary()
    trainer = FakeTrainer(diary, send_error=TrainerError("rank 0 is gone"))
    waiting = FakeEngine(diary, hang=True)
    with pytest.raises(SyncError, match=r"pro@1 did not reach .* nothing of this agent serves yet: rank 0 is gone"):
        asyncio.run(asyncio.wait_for(publisher(trainer, waiting).publish(PolicyVersion("pro", 1)), 2.0))
    assert "e abort_install pro@1" in diary.lines
    assert not any("make_current" in line for line in diary.lines)


@pytest.mark.parametrize("theirs", [(-1.0, -2.1), (-1.0, float("nan"))])
def test_a_probe_out_of_bounds_stops_with_the_numbers(theirs: tuple[float, ...]) -> None:
    diary = Diary()
    with pytest.raises(SyncError, match=r"probe of pro@1: mean .* the bound is 0\.0100"):
        asyncio.run(publisher(FakeTrainer(diary), FakeEngine(diary, logprobs=theirs)).publish(PolicyVersion("pro", 1)))
    assert not any("make_current" in line for line in diary.lines)


def test_older_versions_retire_when_more_than_kept_and_movement_is_measured() -> None:
    diary = Diary()
    trainer, engine = FakeTrainer(diary), FakeEngine(diary)

    async def three() -> float:
        target = publisher(trainer, engine, keep=2)
        await target.publish(PolicyVersion("pro", 0))
        await target.publish(PolicyVersion("pro", 1))
        assert not any("retire" in line for line in diary.lines)
        trainer.logprobs = engine.logprobs = (-1.5, -2.0)
        return (await target.publish(PolicyVersion("pro", 2))).policy_moved

    assert asyncio.run(three()) == 0.25
    assert [line for line in diary.lines if "retire" in line] == ["e retire pro@0"]


def test_a_failed_move_is_tried_again_over_a_fresh_group_while_the_old_version_serves() -> None:
    diary, said = Diary(), list[str]()
    trainer = FakeTrainer(diary)

    async def work() -> int:
        target = publisher(
            trainer, FakeEngine(diary, "a"), FakeEngine(diary, "b"), transport="gloo", retries=2, say=said.append
        )
        await target.join()
        await target.publish(PolicyVersion("pro", 0))
        trainer.send_failures = 2
        diary.lines.clear()
        return (await target.publish(PolicyVersion("pro", 1))).tries

    assert asyncio.run(work()) == 3
    assert [line for line in diary.lines if line.startswith("join")] == ["join weights-1", "join weights-2"]
    assert "a join weights-2 as 1 of 3" in diary.lines
    assert "b join weights-2 as 2 of 3" in diary.lines
    assert len([line for line in diary.lines if line.startswith("export")]) == 1, "it is stored once"
    assert diary.lines.index("a make_current pro@1") > diary.lines.index("join weights-2")
    assert len(said) == 2
    assert "the old version pro@0 serves on; try 2 of 3 follows: a receiver did not take part" in said[0]


def test_the_last_try_that_fails_ends_it_and_so_does_a_dead_engine_at_once() -> None:
    for lost, tries in ((False, 2), (True, 1)):
        diary = Diary()
        trainer, engine = FakeTrainer(diary), FakeEngine(diary)
        trainer.send_failures, engine.is_lost = 9, lost
        with pytest.raises(SyncError, match="did not reach the engines"):
            asyncio.run(publisher(trainer, engine, retries=1).publish(PolicyVersion("pro", 1)))
        assert diary.lines.count("send") == tries


def test_engines_flip_together_or_not_at_all() -> None:
    diary = Diary()
    first, second = FakeEngine(diary, "a"), FakeEngine(diary, "b")
    second.refuses = "make_current pro@1"

    async def work() -> None:
        target = publisher(FakeTrainer(diary), first, second)
        await target.publish(PolicyVersion("pro", 0))
        with pytest.raises(
            SyncError, match=r"pro@1 did not become current; the old version pro@0 serves on: b refused"
        ):
            await target.publish(PolicyVersion("pro", 1))

    asyncio.run(work())
    back = [i for i, line in enumerate(diary.lines) if "make_current pro@0" in line][-2:]
    gone = [diary.lines.index(f"{e} retire pro@1") for e in "ab"]
    assert max(back) < min(gone), "the old version is current again before the new one is dropped"


@pytest.mark.parametrize(
    ("call", "goal"),
    [
        ("begin_install pro@1", "reach the engines over shm"), ("probe pro@1", "answer its probe"),
        ("hold pro", "become current"), ("make_current pro@1", "become current"),
    ],
)  # fmt: skip
def test_whatever_fails_on_the_way_is_said_and_tried_again(call: str, goal: str) -> None:
    diary, said = Diary(), list[str]()
    engine = FakeEngine(diary)

    async def work() -> int:
        target = publisher(FakeTrainer(diary), engine, retries=1, manner=Manner(hold="agent"), say=said.append)
        await target.publish(PolicyVersion("pro", 0))
        engine.refuses, engine.num_refusals = call, 1
        return (await target.publish(PolicyVersion("pro", 1))).tries

    assert asyncio.run(work()) == 2
    assert len(said) == 1
    assert said[0].startswith(f"pro@1 did not {goal}; the old version pro@0 serves on; try 2 of 2 follows: ")
    assert "e refused" in said[0]
    assert [line for line in diary.lines if "make_current" in line or "retire" in line][-1] == "e make_current pro@1"


def test_a_version_that_cannot_be_retired_now_is_retired_with_the_next() -> None:
    diary, said = Diary(), list[str]()
    engine = FakeEngine(diary)
    engine.refuses, engine.num_refusals = "retire pro@0", 1

    async def work() -> None:
        target = publisher(FakeTrainer(diary), engine, keep=1, say=said.append)
        for number in range(3):
            await target.publish(PolicyVersion("pro", number))

    asyncio.run(work())
    assert said == ["pro@0 stays on the engines until the next version of pro: e refused"]
    assert [line for line in diary.lines if "retire" in line] == ["e retire pro@0", "e retire pro@0", "e retire pro@1"]


@pytest.mark.parametrize(
    ("overrides", "manner"),
    [
        ([], Manner()),
        (["sync.interrupt=episode"], Manner()),
        (["sync.interrupt=token"], Manner(flights="swap")),
        (["sync.interrupt=token", "sync.cache=recompute"], Manner(flights="resume")),
        (["rollout.partial=abort_resume"], Manner(flights="resume", abort=True)),
        (["sync.interrupt=drain"], Manner(hold="agent")),
        (["sync.interrupt=blocking"], Manner(hold="everybody")),
        (["sync.interrupt=blocking", "rollout.partial=abort_resume"], Manner(flights="resume", hold="everybody", abort=True)),
    ],
)  # fmt: skip
def test_what_the_settings_mean_to_the_server(overrides: list[str], manner: Manner) -> None:
    assert Manner.of(load_config(None, overrides)) == manner


def test_a_hold_lasts_as_long_as_its_mode_says() -> None:
    def order(hold: str) -> list[str]:
        diary = Diary()

        async def work() -> None:
            target = publisher(FakeTrainer(diary), FakeEngine(diary), manner=Manner(hold=hold))  # type: ignore[arg-type]
            await target.publish_all([PolicyVersion("pro", 0)])
            diary.lines.clear()
            reports = await target.publish_all([PolicyVersion("pro", 1), PolicyVersion("con", 1)])
            assert (reports["pro"].waited_for, reports["pro"].swapped) == (2, 1)

        asyncio.run(work())
        wanted = ("hold", "send", "make_current", "release")
        return [
            line.removeprefix("e ").replace("make_current ", "")
            for line in diary.lines
            if any(w in line for w in wanted)
        ]

    assert order("agent") == ["send", "hold pro", "pro@1", "release", "send", "con@1"], "con had nothing to hold yet"
    assert order("everybody") == ["hold everybody", "send", "pro@1", "send", "con@1", "release"]


def test_a_failure_under_a_hold_releases_it() -> None:
    diary = Diary()
    trainer = FakeTrainer(diary, send_error=TrainerError("rank 0 is gone"))
    with pytest.raises(SyncError):
        asyncio.run(
            publisher(trainer, FakeEngine(diary), manner=Manner(hold="everybody")).publish_all(
                [PolicyVersion("pro", 1)]
            )
        )
    assert diary.lines[-1] == "e release"


def test_first_error_is_raised_itself_and_the_rest_cancelled() -> None:
    cancelled = []

    async def slow() -> None:
        try:
            await asyncio.sleep(3600)
        except asyncio.CancelledError:
            cancelled.append(True)
            raise

    async def bad() -> None:
        raise SyncError("no")

    with pytest.raises(SyncError, match=r"^no$"):
        asyncio.run(asyncio.wait_for(all_or_first_error(slow(), bad()), 2.0))
    assert cancelled == [True]
