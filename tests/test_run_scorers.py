"""Process reward and distillation: the same trainer, other scorers, from the files in configs/."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.runs import TINY, Run

from selfplay.models import tiny
from selfplay.store.score_log import ScoreLog, ScoreRecord

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
    found = rows(place)
    assert any(row["agents/player_0/version"] > 0 for row in found), "there was a signal"
    return found


def test_process_reward_and_nobody_is_asked_twice_after_a_kill(tmp_path: Path) -> None:
    run = Run(
        tmp_path, "train", str(CONFIGS / "process-reward.toml"), *FEWER, "train.steps=400", "scorers.judge.kind=jury"
    )
    run.until_step(1)
    run.process.kill()
    run.process.wait()
    again = Run(tmp_path, "resume", "runs/r", f"train.steps={last_step(tmp_path) + 2}", "--json")
    assert again.wait() == 0, again.error_text()
    every = rows(tmp_path)  # the last alone may have been scored before the kill
    asked = [
        sum(row.get(f"scorers/{name}/scored", 0.0) for row in every) for name in ("environment", "legality", "judge")
    ]
    assert min(asked) > 0
    with ScoreLog.open(tmp_path / "runs/r/scores", write=False, say=print) as log:
        said = [msgspec.msgpack.decode(data, type=ScoreRecord) for _, data in log.read_from(0)]
    times = Counter((s.episode_id, s.scorer) for s in said)
    assert set(times.values()) == {1}
    assert len(times) >= 3 * again.result()["accounting"]["trained"]


def last_step(place: Path) -> int:
    return int(rows(place)[-1]["step"])


def rows(place: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (place / "runs/r/metrics.jsonl").read_text().splitlines()]


def test_distillation_from_another_model(tmp_path: Path) -> None:
    """Besides the file's own teacher one of another model, and nothing for how the game went."""
    teacher = another_tiny(tmp_path / "teacher")
    last = train(
        tmp_path, "distillation.toml", "scorers.environment.weight=0", "scorers.other.kind=teacher",
        "scorers.other.agent=base", f"scorers.other.model={teacher}",
    )[-1]  # fmt: skip
    assert min(last["scorers/teacher/scored"], last["scorers/other/scored"]) >= 8
