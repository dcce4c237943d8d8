"""Publishing a version: order of events, failures, and the probe."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from selfplay.controller.publisher import Publisher, all_or_first_error
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

    async def export(self, make: Any, timeout_s: float) -> Exported:
        self.diary.lines.append(f"export {make(1).version}")
        return Exported(request=1, header=HEADER)

    async def send(self, make: Any, timeout_s: float) -> Sent:
        self.diary.lines.append("send")
        if self.send_error is not None:
            raise self.send_error
        return Sent(request=2, digest="d")

    async def probe(self, agent: str, ids: tuple[int, ...], timeout_s: float) -> tuple[float, ...]:
        return self.logprobs


class FakeEngine:
    def __init__(
        self, diary: Diary, name: str = "e", logprobs: tuple[float, ...] = (-1.0, -2.0), hang: bool = False
    ) -> None:
        self.diary, self.name, self.logprobs, self.hang = diary, name, logprobs, hang

    def __getattr__(self, call: str) -> Any:
        async def record(version: PolicyVersion, *_: Any) -> Any:
            self.diary.lines.append(f"{self.name} {call} {version}")
            if call == "commit_install" and self.hang:
                await asyncio.sleep(3600)
            return self.logprobs if call == "probe" else {}

        return record


def publisher(trainer: FakeTrainer, *engines: FakeEngine, keep: int = 2) -> Publisher:
    return Publisher(
        trainer=trainer, engines=engines, transport="shm", address="", adapters=Path("adapters"), probe_ids=(1, 2, 3),  # type: ignore[arg-type]
        probe_bound=0.01, timeout_s=5.0, keep=keep,
    )  # fmt: skip


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


def test_a_failed_send_is_given_up_everywhere_at_once_and_the_old_version_stays() -> None:
    diary = Diary()
    trainer = FakeTrainer(diary, send_error=TrainerError("rank 0 is gone"))
    waiting = FakeEngine(diary, hang=True)
    with pytest.raises(SyncError, match=r"pro@1 did not reach .* the old version serves on: rank 0 is gone"):
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
