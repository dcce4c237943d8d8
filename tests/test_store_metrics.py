"""Metrics: valid JSON whatever is measured, torn lines, resumes, TensorBoard as a copy that may fail."""

from __future__ import annotations

import errno
import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest

from selfplay.errors import StoreError
from selfplay.store import metrics as module
from selfplay.store.metrics import MetricsLog, read_metrics
from selfplay.store.text import json_line
from selfplay.wire.text import safe_text

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "metrics.jsonl"


def no_one(message: str) -> None:
    raise AssertionError(message)


def write(path: Path, *steps: int, resume_step: int | None = None) -> None:
    with MetricsLog.open(path, None, say=no_one, resume_step=resume_step) as log:
        for step in steps:
            log.write(step, {"loss": step / 2})


def test_rows_come_back(path: Path) -> None:
    with MetricsLog.open(path, None, say=no_one) as log:
        log.write(1, {"agent/pro/kl": 0.5, "note": "x", "ok": True, "none": None, "n": 3})
    (row,) = read_metrics(path)
    assert row.items() >= {"step": 1, "agent/pro/kl": 0.5, "note": "x", "ok": True, "none": None, "n": 3}.items()
    assert "nonfinite" not in row


def test_what_is_no_number_becomes_null_and_is_counted(path: Path) -> None:
    with MetricsLog.open(path, None, say=no_one) as log:
        log.write(1, {"a": math.nan, "b": math.inf, "c": -math.inf, "d": 1.0})
        assert log.num_nonfinite == 3

    def forbid(name: str) -> None:
        raise AssertionError(name)

    row = json.loads(path.read_text(), parse_constant=forbid)
    assert (row["a"], row["b"], row["c"], row["d"], row["nonfinite"]) == (None, None, None, 1.0, 3)


def test_a_torn_last_line_is_cut_at_every_byte(tmp_path: Path) -> None:
    whole = tmp_path / "whole.jsonl"
    write(whole, 1, 2)
    data = whole.read_bytes()
    first_end = data.index(b"\n") + 1
    for cut in range(len(data) + 1):
        path = tmp_path / f"cut{cut}.jsonl"
        path.write_bytes(data[:cut])
        kept = (cut >= first_end) + (cut == len(data))
        assert len(read_metrics(path)) == kept
        write(path, 9)
        assert [r["step"] for r in read_metrics(path)] == [*range(1, kept + 1), 9]
        assert all(json.loads(line) for line in path.read_text().splitlines())


def test_a_very_long_torn_line_is_cut(path: Path) -> None:
    write(path, 1)
    with path.open("ab") as f:
        f.write(b'{"x": "' + b"y" * 200_000)
    write(path, 2)
    assert [r["step"] for r in read_metrics(path)] == [1, 2]


def test_a_resume_leaves_out_what_it_went_back_behind(path: Path) -> None:
    write(path, 1, 2, 3, 4)
    write(path, 3, resume_step=2)
    assert [r["step"] for r in read_metrics(path)] == [1, 2, 3]
    assert len(path.read_text().splitlines()) == 6


def test_damage_in_the_middle_is_named(path: Path) -> None:
    write(path, 1)
    with path.open("a") as f:
        f.write("nonsense\n")
    with pytest.raises(StoreError, match=r"metrics\.jsonl line 2 is damaged"):
        read_metrics(path)


def test_no_metrics_yet(path: Path) -> None:
    assert read_metrics(path) == []


def test_a_full_disk_is_one_line_and_leaves_no_half_line(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write = os.write

    def half_then_full(fd: int, data: memoryview) -> int:
        if len(data) > 10:
            return write(fd, data[:-10])
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with MetricsLog.open(path, None, say=no_one) as log:
        log.write(1, {"loss": 1.0})
        monkeypatch.setattr(module.os, "write", half_then_full)
        with pytest.raises(StoreError, match=r"metrics\.jsonl: No space left on device"):
            log.write(2, {"loss": 1.0})
        monkeypatch.undo()
        log.write(3, {"loss": 1.0})
    assert [r["step"] for r in read_metrics(path)] == [1, 3]


def test_an_unwritable_place_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="absent"):
        MetricsLog.open(tmp_path / "absent" / "metrics.jsonl", None, say=no_one)


# ── TensorBoard ──────────────────────────────────────────────────────────────────────────────────

READ_EVENTS = """
import sys, json, warnings
warnings.simplefilter("ignore")
from pathlib import Path
from selfplay.store.metrics import MetricsLog
run = Path(sys.argv[1])
with MetricsLog.open(run / "metrics.jsonl", run / "tensorboard", say=print) as log:
    for step in (1, 2, 3):
        log.write(step, {"loss": step / 2, "note": "text", "bad": float("nan")})
with MetricsLog.open(run / "metrics.jsonl", run / "tensorboard", say=print, resume_step=1) as log:
    log.write(2, {"loss": 7.0})
heavy = [m for m in ("torch", "tensorflow") if m in sys.modules]
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
events = EventAccumulator(str(run / "tensorboard"))
events.Reload()
print(json.dumps([heavy, events.Tags()["scalars"], [(e.step, e.value) for e in events.Scalars("loss")]]))
"""


def test_tensorboard_reads_the_same_numbers_and_nothing_heavy_is_loaded(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", READ_EVENTS, str(tmp_path)],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert done.returncode == 0, done.stderr
    heavy, tags, loss = json.loads(done.stdout.splitlines()[-1])
    assert heavy == []
    assert tags == ["loss", "nonfinite"]
    assert loss == [[1, 0.5], [2, 7.0]]


def test_without_tensorboard_it_is_said_once(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module.importlib.util, "find_spec", lambda name: None)
    said: list[str] = []
    with MetricsLog.open(path, path.parent / "tensorboard", say=said.append) as log:
        log.write(1, {"loss": 1.0})
        log.write(2, {"loss": 1.0})
    assert len(said) == 1
    assert "pip install tensorboard" in said[0]
    assert len(read_metrics(path)) == 2


class FailingWriter:
    def __init__(self) -> None:
        self.calls = 0

    def add_event(self, event: object) -> None:
        self.calls += 1
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_events_that_fail_end_aloud_and_the_run_goes_on(path: Path) -> None:
    said: list[str] = []
    writer = FailingWriter()
    events = module.EventWriter(writer, lambda **kw: kw, said.append)
    with MetricsLog.open(path, None, say=no_one) as log:
        log._events = events
        log.write(1, {"loss": 1.0})
        log.write(2, {"loss": 1.0})
    assert (writer.calls, len(said)) == (1, 1)
    assert "No space left on device" in said[0]
    assert len(read_metrics(path)) == 2


# ── text ─────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain", "plain"),
        ("débat 日本 สวัสดี", "débat 日本 สวัสดี"),
        ("\x1b[31mred", r"\x1b[31mred"),
        ("a\rb\nc", r"a\x0db\x0ac"),
        ("\u202egnp.exe", r"\u202egnp.exe"),
        ("\x9b31m", r"\x9b31m"),
        ("\x7f", r"\x7f"),
        ("\ud83d", r"\ud83d"),
        ("\U000e0041", r"\U000e0041"),
    ],
)
def test_hidden_characters_are_shown_not_obeyed(text: str, shown: str) -> None:
    assert safe_text(text) == shown


def test_kept_characters_stay() -> None:
    assert safe_text("a\nb\x1b", keep="\n") == "a\nb\\x1b"


@pytest.mark.parametrize("text", ["\x1b[2J", "\u202e", "a\u2028b", "\x85", "\x7f", "\U000e0041", "plain", "日本"])
def test_json_lines_are_safe_and_lose_nothing(text: str) -> None:
    line = json_line({"text": text})
    assert json.loads(line) == {"text": text}
    assert safe_text(line) == line
