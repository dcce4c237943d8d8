"""The pool benchmark runs and reports rows of the common schema; how fast is not asserted."""

from __future__ import annotations

import math

from selfplay.bench.pool import run


def test_the_pool_benchmark_reports_its_rows() -> None:
    rows = {row.name: row for row in run(quick=True)}
    assert set(rows) == {"overhead_us_per_turn", "worker_cpu_us_per_turn", "turns_per_s", "episodes_per_s"}
    assert all(math.isfinite(row.value) and row.value >= 0 and row.repeats >= 2 for row in rows.values())
    assert "plain Python loop" in rows["overhead_us_per_turn"].reference
    assert rows["overhead_us_per_turn"].ratio is not None
