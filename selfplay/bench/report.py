"""What a benchmark reports: rows of one measured value beside its reference, and the machine it ran on.

In: rows from ``selfplay.bench.NAME.run``. Out: a `Report`, as JSON or as a table.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator
from pathlib import Path

import msgspec


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One figure: the median of ``repeats`` measurements, unless ``reference`` names another choice.

    ``ratio`` compares it with ``reference``, which was measured in the same run; both are empty for an absolute figure.
    """

    name: str
    value: float
    unit: str
    reference: str = ""
    ratio: float | None = None
    repeats: int = 1


class Machine(msgspec.Struct, frozen=True, kw_only=True):
    """Where the figures were taken."""

    system: str
    processor: str
    cores: int
    memory_gib: float
    gpus: tuple[str, ...]
    python: str


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """One benchmark's rows."""

    bench: str
    machine: Machine
    results: tuple[Row, ...]


def describe_machine(gpus: tuple[str, ...] = ()) -> Machine:
    """This machine, as far as the standard library sees it."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return Machine(
        system=f"{platform.system()} {platform.machine()}",
        processor=_processor(),
        cores=cores,
        memory_gib=round(memory / 2**30, 1),
        gpus=gpus,
        python=platform.python_version(),
    )


def _processor() -> str:
    """The CPU's own name where the system tells it."""
    try:
        with Path("/proc/cpuinfo").open(encoding="utf-8") as f:
            return next((line.partition(":")[2].strip() for line in f if line.startswith("model name")), "")
    except OSError:
        return platform.processor()


def table(report: Report) -> str:
    """The rows for people: name, value, and the ratio to what."""
    return "\n".join([f"{report.bench}  ({_machine_line(report.machine)})", *_row_lines(report.results)])


def _machine_line(machine: Machine) -> str:
    what = [f"{machine.cores} cores", f"{machine.memory_gib:g} GiB", *machine.gpus]
    return ", ".join([machine.processor or machine.system, *what])


def _row_lines(rows: tuple[Row, ...]) -> Iterator[str]:
    width = max((len(r.name) for r in rows), default=0)
    for row in rows:
        line = f"  {row.name:<{width}}  {row.value:>12.4g} {row.unit:<10}"
        if row.ratio is not None:
            line += f"  {row.ratio:.2f} × {row.reference}"
        elif row.reference:
            line += f"  ({row.reference})"
        yield f"{line}  [{row.repeats} repeats]" if row.repeats > 1 else line.rstrip()
