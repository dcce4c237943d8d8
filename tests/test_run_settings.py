"""A run on two ranks that share the base, and sitting down against what it made. Modes and transports: test_run_modes.py."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.runs import TINY, Run

pytestmark = pytest.mark.engine


def test_two_ranks_share_the_base_and_a_checkpoint_sits_down(tmp_path: Path) -> None:
    settings = (
        "train.ranks=2", "train.shard=base", "sync.transport=shm", "policy.engine=transformers",
        "eval.every=2", "eval.exact=false", 'eval.anchors=["base", "random"]', "eval.games=1",
    )  # fmt: skip
    run = Run(tmp_path, "train", "--env", "debate-v0", "train.steps=2", "name=r", "--json", *TINY, *settings)
    assert run.wait() == 0, run.error_text()
    result = run.result()
    assert {a: tuple(v) for a, v in result["versions"].items()} == {"pro": (0, 2), "con": (0, 2)}
    rows = [json.loads(line) for line in (tmp_path / "runs/r/metrics.jsonl").read_text().splitlines()]
    assert max(r["staleness_max"] for r in rows) <= 1
    assert all(r[f"agents/{a}/probe_mean"] < 0.001 for r in rows for a in ("pro", "con"))
    evaluated = [r["step"] for r in rows if "evaluation/base/points" in r]
    assert evaluated == [2]
    assert rows[-1]["accounting/stored"] == len(rows) * rows[-1]["episodes"]  # games against anchors are not among them

    play = Run(tmp_path, "play", "debate-v0", "--run", "runs/r", "--players", "pro@2,base", "--jury", "even", "--json")
    assert play.wait() == 0, play.error_text()
    assert '"pro"' in play.out.read_text()
