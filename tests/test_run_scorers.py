"""Process reward and distillation: the same trainer, other scorers, from the files in configs/."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from runs import TINY, Run

pytestmark = pytest.mark.engine

CONFIGS = Path(__file__).resolve().parent.parent / "configs"
FEWER = (*TINY[1:], "train.steps=2", "name=r", "--json")


@pytest.mark.parametrize(
    ("config", "more", "scorers"),
    [
        ("process-reward.toml", ("policy.engine=transformers",), {"environment", "legality"}),
        ("distillation.toml", ("scorers.other.kind=teacher", "scorers.other.model=tiny"), {"teacher", "other"}),
    ],
)
def test_other_scorers_train(tmp_path: Path, config: str, more: tuple[str, ...], scorers: set[str]) -> None:
    if "other" in scorers:
        more = (*more, "scorers.other.agent=base")
    run = Run(tmp_path, "train", str(CONFIGS / config), *FEWER, *more)
    assert run.wait() == 0, run.error_text()
    rows = [json.loads(line) for line in (tmp_path / "runs/r/metrics.jsonl").read_text().splitlines()]
    for name in scorers:
        assert rows[-1][f"scorers/{name}/scored"] >= 8
    assert run.result()["accounting"]["trained"] == 8
    assert any(row["agents/player_0/version"] > 0 for row in rows), "there was a signal"
