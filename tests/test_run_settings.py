"""Runs with other settings than the defaults: ranks, transports, engines, modes; and sitting down against a checkpoint."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.runs import TINY, Run

pytestmark = pytest.mark.engine

SETTINGS = {
    "two ranks, sharded base, shm": ("train.ranks=2", "train.shard=base", "sync.transport=shm"),
    "transformers, file, synchronous": (
        "policy.engine=transformers", "sync.transport=file", "sync.interrupt=episode", "buffer.depth=0",
    ),
}  # fmt: skip


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS.keys())
def test_run_with(tmp_path: Path, settings: tuple[str, ...]) -> None:
    run = Run(tmp_path, "train", "--env", "debate-v0", "train.steps=2", "name=r", "--json", *TINY, *settings)
    assert run.wait() == 0, run.error_text()
    result = run.result()
    assert {a: tuple(v) for a, v in result["versions"].items()} == {"pro": (0, 2), "con": (0, 2)}
    rows = [json.loads(line) for line in (tmp_path / "runs/r/metrics.jsonl").read_text().splitlines()]
    depth = 0 if "buffer.depth=0" in settings else 1
    assert max(r["staleness_max"] for r in rows) <= depth
    assert all(r[f"agents/{a}/probe_mean"] < 0.001 for r in rows for a in ("pro", "con"))

    play = Run(tmp_path, "play", "debate-v0", "--run", "runs/r", "--players", "pro@2,base", "--jury", "even", "--json")
    assert play.wait() == 0, play.error_text()
    assert '"pro"' in play.out.read_text()
