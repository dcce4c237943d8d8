"""Metrics on disk: ``metrics.jsonl``, and the same numbers as TensorBoard events where TensorBoard is installed.

In: one flat mapping of names to values per report. Out: one line of valid JSON, always: a NaN or infinity becomes null
and is counted in the line's ``nonfinite``. The file is only ever appended to: a resume writes a marker, and readers
leave out what a resume went back behind.
"""

from __future__ import annotations

import contextlib
import importlib.util
import math
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from selfplay.config.plain_file import read_plain
from selfplay.errors import StoreError
from selfplay.store.atomic import as_store_error, store_errors
from selfplay.store.text import json_line

MAX_FILE_BYTES = 1 << 30

Value = float | int | str | bool | None
Row = dict[str, Any]


class MetricsLog:
    """Appends reports. ``say`` hears, once each, what could not be done.

    >>> with MetricsLog.open(run.metrics_path, run.tensorboard, say=print) as metrics:
    ...     metrics.write(3, {"agents/pro/train/kl": 0.01, "accounting/started": 24})
    """

    def __init__(self, path: Path, fd: int, events: EventWriter | None) -> None:
        self._path, self._fd, self._events = path, fd, events
        self.num_nonfinite = 0

    @classmethod
    def open(
        cls, path: Path, tensorboard: Path | None, *, say: Callable[[str], None], resume_step: int | None = None
    ) -> MetricsLog:
        """Open for appending; a last line that was torn by a crash is cut off. ``resume_step`` marks a resume from there."""
        with store_errors(path):
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
            _cut_torn_line(fd)
        events = EventWriter.open(tensorboard, resume_step, say) if tensorboard is not None else None
        log = cls(path, fd, events)
        if resume_step is not None:
            log._append({"resume": resume_step, "time": time.time()})
        return log

    def write(self, step: int, values: Mapping[str, Value]) -> None:
        """Append one report about ``step``; raises `StoreError` when the disk refuses."""
        row: Row = {"step": step, "time": time.time()}
        bad = 0
        for name, value in values.items():
            finite = not isinstance(value, float) or math.isfinite(value)
            row[name] = value if finite else None
            bad += not finite
        if bad:
            row["nonfinite"] = bad
            self.num_nonfinite += bad
        self._append(row)
        if self._events is not None:
            self._events.write(step, row)

    def close(self) -> None:
        """Idempotent."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
        if self._events is not None:
            self._events.close()

    def __enter__(self) -> MetricsLog:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _append(self, row: Row) -> None:
        data = memoryview(f"{json_line(row)}\n".encode())
        end = os.fstat(self._fd).st_size
        try:
            while data:
                data = data[os.write(self._fd, data) :]
        except OSError as e:
            with contextlib.suppress(OSError):  # no half line stays, where the disk still allows that much
                os.ftruncate(self._fd, end)
            raise as_store_error(self._path, e) from e


def read_metrics(path: Path) -> list[Row]:
    """All reports that still stand, in order: without what a resume went back behind. Raises `StoreError` when damaged."""
    rows: list[Row] = []
    with store_errors(path):
        lines = read_plain(path, MAX_FILE_BYTES).split(b"\n") if path.exists() else [b""]
    for number, line in enumerate(lines[:-1], 1):  # what follows the last line break is empty or torn
        try:
            row = msgspec.json.decode(line, type=Row)
        except (msgspec.DecodeError, UnicodeDecodeError) as e:
            raise StoreError(f"{path} line {number} is damaged: {e}") from None
        if "resume" in row:
            rows = [r for r in rows if r["step"] <= row["resume"]]
        else:
            rows.append(row)
    return rows


def _cut_torn_line(fd: int) -> None:
    end = os.lseek(fd, 0, os.SEEK_END)
    position = end
    while position > 0:
        start = max(0, position - 65536)
        found = os.pread(fd, position - start, start).rfind(b"\n")
        if found >= 0:
            position = start + found + 1
            break
        position = start
    if position < end:
        os.ftruncate(fd, position)


class EventWriter:
    """TensorBoard events through the ``tensorboard`` package's own writer, which needs neither torch nor TensorFlow."""

    def __init__(self, writer: Any, make_event: Callable[..., Any], say: Callable[[str], None]) -> None:
        self._writer, self._make_event, self._say = writer, make_event, say

    @classmethod
    def open(cls, folder: Path, resume_step: int | None, say: Callable[[str], None]) -> EventWriter | None:
        """None, and a word about it, when TensorBoard is not installed or the folder cannot be written."""
        if importlib.util.find_spec("tensorboard") is None:
            say("no TensorBoard events: pip install tensorboard  adds them; metrics.jsonl has everything")
            return None
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        try:
            folder.mkdir(exist_ok=True)
            self = cls(EventFileWriter(str(folder)), Event, say)
        except OSError as e:
            say(f"no TensorBoard events: {folder}: {e.strerror}; metrics.jsonl has everything")
            return None
        if resume_step is not None:  # tells TensorBoard to forget what comes after this step in older files
            self._add(
                Event(wall_time=time.time(), step=resume_step + 1, session_log=SessionLog(status=SessionLog.START))
            )
        return self

    def write(self, step: int, row: Mapping[str, Value]) -> None:
        """One event with all the numbers of a report."""
        from tensorboard.compat.proto.summary_pb2 import Summary

        numbers = {k: float(v) for k, v in row.items() if isinstance(v, int | float) and k not in ("step", "time")}
        summary = Summary(value=[Summary.Value(tag=name, simple_value=v) for name, v in numbers.items()])
        self._add(self._make_event(wall_time=time.time(), step=step, summary=summary))

    def close(self) -> None:
        """Flush and stop the writer's thread; idempotent."""
        self._guard(lambda writer: writer.close())
        self._writer = None

    def _add(self, event: Any) -> None:
        self._guard(lambda writer: (writer.add_event(event), writer.flush()))

    def _guard(self, act: Callable[[Any], object]) -> None:
        """Events are a copy: losing them is said once and ends them, and the run goes on."""
        if self._writer is None:
            return
        try:
            act(self._writer)
        except OSError as e:
            self._writer = None
            self._say(f"TensorBoard events end here: {e.strerror or e}; metrics.jsonl goes on")
