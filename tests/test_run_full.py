"""A run whose agents train every parameter of the tiny model, and going on with it; the base judges in the same engine."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.runs import TINY, Run

from selfplay.store.adapters import AdapterStore
from selfplay.store.peft_format import read_config, whole_modules
from selfplay.types import PolicyVersion

pytestmark = pytest.mark.engine

FULL = ("train", "--env", "debate-v0", "train.parameters=full", "--json", *TINY)


def test_whole_models_train_and_go_on(tmp_path: Path) -> None:
    settings = ("policy.engine=transformers", "sync.transport=shm", "algorithm.kl=0.1", "algorithm.reference=moving")
    run = Run(tmp_path, *FULL, *settings, "train.steps=1", "name=r")
    assert run.wait() == 0, run.error_text()
    again = Run(tmp_path, "resume", "runs/r", "train.steps=2", "--json")
    assert again.wait() == 0, again.error_text()
    lines = (tmp_path / "runs/r/metrics.jsonl").read_text().splitlines()
    rows = [row for row in map(json.loads, lines) if "step" in row]
    assert [row["step"] for row in rows] == [1, 2]
    assert all(row[f"agents/{a}/probe_mean"] < 0.001 for row in rows for a in ("pro", "con"))
    store = AdapterStore(tmp_path / "runs/r/adapters")
    for agent in ("pro", "con"):
        assert store.versions(agent) == tuple(PolicyVersion(agent, n) for n in range(3))
        assert "model.embed_tokens" in whole_modules(read_config(store.path(PolicyVersion(agent, 2))))
