"""Checkpoints: whole or not there, damage skipped aloud, old ones deleted, and the plan to go on."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from episode_samples import episode
from selfplay.buffer import Ledger
from selfplay.errors import StoreError
from selfplay.store import checkpoints as module
from selfplay.store.checkpoints import REPLACED, Checkpoints, load_checkpoint
from selfplay.store.state import Consumed, PendingMatch, RunState, plan_resume


def state(step: int, **kw: object) -> RunState:
    return RunState(step=step, versions={"pro": step}, **kw)  # type: ignore[arg-type]


class Folder:
    """Checkpoints below a folder, and what they said."""

    def __init__(self, root: Path, keep: int = 2) -> None:
        self.said: list[str] = []
        self.root = root
        self.checkpoints = Checkpoints(root, keep=keep, say=self.said.append)

    def save(self, step: int, content: str = "") -> None:
        with self.checkpoints.writing(state(step)) as folder:
            (folder / "trainer").mkdir()
            (folder / "trainer" / "__0_0.distcp").write_text(content or f"weights {step}")

    def latest_step(self) -> int | None:
        latest = self.checkpoints.latest()
        return latest.step if latest else None


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    return Folder(tmp_path)


def test_the_newest_comes_back_with_its_state(folder: Folder) -> None:
    folder.save(1)
    folder.save(2)
    latest = folder.checkpoints.latest()
    assert latest is not None
    assert (latest.step, latest.state) == (2, state(2))
    assert (latest.folder / "trainer" / "__0_0.distcp").read_text() == "weights 2"


def test_none_at_the_beginning(folder: Folder) -> None:
    assert folder.checkpoints.latest() is None
    assert Checkpoints(folder.root / "absent", keep=1, say=print).latest() is None


def test_the_last_few_are_kept(folder: Folder) -> None:
    for step in (1, 2, 3, 10):
        folder.save(step)
    assert folder.checkpoints.steps() == (3, 10)


def test_a_failure_while_saving_leaves_nothing_and_the_old_one_stands(folder: Folder) -> None:
    folder.save(1)

    def save_half() -> None:
        with folder.checkpoints.writing(state(2)) as path:
            (path / "half").write_text("x")
            raise RuntimeError("rank died")

    with pytest.raises(RuntimeError, match="rank died"):
        save_half()
    assert [p.name for p in folder.root.iterdir()] == ["1"]
    assert folder.latest_step() == 1


def test_a_full_disk_is_one_line_and_the_old_one_stands(folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    folder.save(1)

    def full(*args: object, **kw: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(module, "_fingerprints", full)
    with pytest.raises(StoreError, match="No space left on device"):
        folder.save(2)
    monkeypatch.undo()
    assert folder.latest_step() == 1


def damage_missing(path: Path) -> None:
    (path / "trainer" / "__0_0.distcp").unlink()


def damage_byte(path: Path) -> None:
    (path / "trainer" / "__0_0.distcp").write_text("weights X")


def damage_extra(path: Path) -> None:
    (path / "trainer" / "__1_0.distcp").write_text("of another run")


def damage_state(path: Path) -> None:
    os.truncate(path / "state.json", 20)


def damage_no_state(path: Path) -> None:
    (path / "state.json").unlink()


def damage_link(path: Path) -> None:
    (path / "trainer" / "__0_0.distcp").rename(path.parent / "elsewhere")
    (path / "trainer" / "__0_0.distcp").symlink_to(path.parent / "elsewhere")


def damage_mixed(path: Path) -> None:
    shutil.rmtree(path)
    shutil.copytree(path.with_name("1"), path)


def damage_layout(path: Path) -> None:
    record = msgspec.json.decode((path / "state.json").read_bytes())
    (path / "state.json").write_bytes(msgspec.json.encode(record | {"schema": 99}))


@pytest.mark.parametrize(
    "damage",
    [
        damage_missing,
        damage_byte,
        damage_extra,
        damage_state,
        damage_no_state,
        damage_link,
        damage_mixed,
        damage_layout,
    ],
)
def test_a_damaged_newest_is_skipped_with_a_message(folder: Folder, damage: object) -> None:
    folder.save(1)
    folder.save(2)
    damage(folder.root / "2")  # type: ignore[operator]
    assert folder.latest_step() == 1
    assert len(folder.said) == 1
    assert folder.said[0].startswith("checkpoint 2 is skipped: ")


def test_a_damaged_checkpoint_is_written_again_and_never_pushes_out_the_good_one(folder: Folder) -> None:
    one = Folder(folder.root, keep=1)
    one.save(1)
    shutil.copytree(folder.root / "1", folder.root / "3")  # not a checkpoint of step 3
    one.save(2)
    assert one.latest_step() == 2
    one.save(3)
    assert one.latest_step() == 3
    assert one.checkpoints.steps() == (3,)


def test_the_same_step_can_be_saved_again(folder: Folder) -> None:
    folder.save(1, "old")
    folder.save(1, "new")
    assert (folder.root / "1" / "trainer" / "__0_0.distcp").read_text() == "new"
    assert [p.name for p in folder.root.iterdir()] == ["1"]


def test_a_kill_while_replacing_loses_neither(folder: Folder) -> None:
    folder.save(1, "old")
    (folder.root / "1").rename(folder.root / f"1{REPLACED}")
    assert folder.latest_step() == 1
    folder.save(2)
    assert folder.checkpoints.steps() == (1, 2)
    assert sorted(p.name for p in folder.root.iterdir()) == ["1", "2"]


def test_leftovers_of_a_killed_writer_are_removed_and_never_read(folder: Folder) -> None:
    folder.save(1)
    shutil.copytree(folder.root / "1", folder.root / ".tmp-2-abcd")
    assert folder.latest_step() == 1
    assert folder.checkpoints.remove_leftovers() == 1
    assert [p.name for p in folder.root.iterdir()] == ["1"]


def test_an_old_one_that_cannot_be_deleted_stops_nothing(folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    for step in (1, 2):
        folder.save(step)

    def denied(path: Path, **kw: object) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    monkeypatch.setattr(module.shutil, "rmtree", denied)
    folder.save(3)
    monkeypatch.undo()
    assert folder.latest_step() == 3
    assert any("could not be deleted: Permission denied" in m for m in folder.said)


def test_keeping_none_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="keep=0"):
        Checkpoints(tmp_path, keep=0, say=print)


def test_an_unknown_field_in_a_state_is_damage(folder: Folder) -> None:
    folder.save(1)
    path = folder.root / "1" / "state.json"
    record = msgspec.json.decode(path.read_bytes())
    record["state"]["surprise"] = 1
    path.write_bytes(msgspec.json.encode(record))
    with pytest.raises(StoreError, match="surprise"):
        load_checkpoint(folder.root / "1")


# ── going on ─────────────────────────────────────────────────────────────────────────────────────


def test_consumed_numbers_become_a_watermark() -> None:
    consumed = Consumed()
    consumed.add([1, 0, 3])
    assert (consumed.below, consumed.beyond) == (2, (3,))
    consumed.add([2])
    assert (consumed.below, consumed.beyond) == (4, ())
    for again in (0, 3):
        with pytest.raises(ValueError, match="consumed before"):
            consumed.add([again])


@given(st.permutations(range(12)), st.integers(0, 12))
def test_consumed_is_the_set_of_what_was_added(order: list[int], num: int) -> None:
    consumed = Consumed()
    consumed.add(order[:num])
    assert {*range(consumed.below), *consumed.beyond} == set(order[:num])
    assert Consumed(consumed.below, consumed.beyond).beyond == consumed.beyond


def test_a_resume_takes_up_everything_the_log_has_and_plays_the_rest_again() -> None:
    ledger = Ledger()
    for i in range(6):
        ledger.start(f"{i}.0")
    for i in (0, 1, 2):
        ledger.store(f"{i}.0")
    ledger.train(2)
    # numbers 0 and 2 were trained on; 3, 4, 5 are in flight. After the checkpoint 4 was logged, and 6 was begun and logged.
    saved = state(
        1, consumed_below=1, consumed_beyond=(2,), logged=3, next_match=6, pending=tuple(PendingMatch(i, 0) for i in (3, 4, 5)),
        ledger=ledger.snapshot(),
    )  # fmt: skip
    logged = [(1, episode(1)), (2, episode(2)), (3, episode(4)), (4, episode(6, versions={"pro": 2}))]
    plan = plan_resume(saved, logged, next_seq=5)
    assert plan.buffer == (1, 3, 4)
    assert plan.replay == (PendingMatch(3, 1), PendingMatch(5, 1))
    assert (plan.next_match, plan.skip) == (6, frozenset({6}))
    assert plan.from_lost_versions == (4,)
    report = Ledger(plan.ledger).check(waiting=3, in_flight=0)
    assert (report.started, report.trained, report.void) == (7, 2, {"process ended": 2})


def test_a_match_that_was_tried_again_after_the_checkpoint_is_not_played_a_third_time() -> None:
    ledger = Ledger()
    ledger.start("0.0")
    saved = state(0, next_match=1, pending=(PendingMatch(0, 0),), ledger=ledger.snapshot())
    plan = plan_resume(saved, [(0, episode(0, attempt=1))], next_seq=1)
    assert plan.replay == ()
    assert Ledger(plan.ledger).check(waiting=1).void == {"process ended": 1}


def test_a_checkpoint_between_an_append_and_its_ledger_entry_counts_the_episode_once() -> None:
    ledger = Ledger()
    ledger.start("0.0")
    saved = state(0, logged=1, next_match=1, pending=(PendingMatch(0, 0),), ledger=ledger.snapshot())
    plan = plan_resume(saved, [(0, episode(0))], next_seq=1)
    assert (plan.buffer, plan.replay) == ((0,), ())
    report = Ledger(plan.ledger).check(waiting=1, in_flight=0)
    assert (report.started, report.void) == (1, {})


def test_a_log_shorter_than_the_checkpoint_is_refused() -> None:
    with pytest.raises(StoreError, match="ends at 2, but the checkpoint of step 4 knew 3"):
        plan_resume(state(4, logged=3), [], next_seq=2)


def test_a_state_survives_json() -> None:
    full = state(
        3, consumed_below=4, consumed_beyond=(6, 9), pending=(PendingMatch(1, 2),), algorithm={'["a"]': 0.5}, rng={"np": (1, 2)},
        counters={"tokens": 1e9}, digests={"pro@3": "ab"},
    )  # fmt: skip
    assert msgspec.json.decode(msgspec.json.encode(full), type=RunState) == full
