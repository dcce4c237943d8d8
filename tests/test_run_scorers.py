"""Process reward and distillation: the same trainer, other scorers, from the files in configs/."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tests.runs import TINY, Run

from selfplay.models import tiny

pytestmark = pytest.mark.engine

CONFIGS = Path(__file__).resolve().parent.parent / "configs"
FEWER = (*TINY[1:], "train.steps=2", "policy.engine=transformers", "name=r", "--json")


def another_tiny(folder: Path) -> Path:
    """The tiny model with another head: the same tokenizer, other opinions."""
    from safetensors.numpy import load_file, save_file

    folder.mkdir()
    tiny.write(folder)
    weights = load_file(folder / "model.safetensors")
    weights["lm_head.weight"] = weights["lm_head.weight"][::-1].copy()
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def train(place: Path, config: str, *more: str) -> list[dict[str, Any]]:
    run = Run(place, "train", str(CONFIGS / config), *FEWER, *more)
    assert run.wait() == 0, run.error_text()
    assert run.result()["accounting"]["trained"] == 8
    rows = [json.loads(line) for line in (place / "runs/r/metrics.jsonl").read_text().splitlines()]
    assert any(row["agents/player_0/version"] > 0 for row in rows), "there was a signal"
    return rows


def test_process_reward(tmp_path: Path) -> None:
    last = train(tmp_path, "process-reward.toml")[-1]
    assert min(last["scorers/environment/scored"], last["scorers/legality/scored"]) >= 8


def test_distillation_from_another_model(tmp_path: Path) -> None:
    """Besides the file's own teacher one of another model, and nothing for how the game went."""
    teacher = another_tiny(tmp_path / "teacher")
    last = train(
        tmp_path, "distillation.toml", "scorers.environment.weight=0", "scorers.other.kind=teacher",
        "scorers.other.agent=base", f"scorers.other.model={teacher}",
    )[-1]  # fmt: skip
    assert min(last["scorers/teacher/scored"], last["scorers/other/scored"]) >= 8
