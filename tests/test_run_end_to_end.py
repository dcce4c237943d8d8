"""A whole run from the shell: real vLLM, real trainer, real workers, on the tiny model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.runs import TINY, Run, runtime_folders, still_alive

pytestmark = pytest.mark.engine


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """One run of five steps, looked at by several tests."""
    before = runtime_folders()
    run = Run(
        tmp_path_factory.mktemp("run"), "train", "--env", "debate-v0", "train.steps=5", "name=first", "--json", *TINY
    )
    assert run.wait() == 0, run.error_text()
    assert runtime_folders() <= before
    return run


def test_versions_move_and_accounting_adds_up(finished: Run) -> None:
    result = finished.result()
    assert result["outcome"] == "finished"
    assert result["step"] == 5
    assert {a: tuple(v) for a, v in result["versions"].items()} == {"pro": (0, 5), "con": (0, 5)}
    counts = result["accounting"]
    lost = sum(sum(counts[k].values()) for k in ("failed", "void", "dropped"))
    assert counts["started"] == counts["stored"] + counts["in_flight"] + lost
    assert counts["trained"] == 20
    assert result["engine"].startswith("vllm")


def test_every_step_is_measured_and_proven(finished: Run) -> None:
    rows = [json.loads(line) for line in (finished.folder / "runs/first/metrics.jsonl").read_text().splitlines()]
    assert [r["step"] for r in rows] == [1, 2, 3, 4, 5]
    for row in rows:
        assert row["staleness_max"] <= 1
        for agent in ("pro", "con"):
            assert row[f"agents/{agent}/probe_mean"] < 0.001
            assert row[f"agents/{agent}/policy_moved"] > 0 or row["step"] == 1
            # At the first step nothing has moved: trainer and engine must agree on every token that was sampled.
            assert row[f"agents/{agent}/train/max_abs_dlogp"] < (0.001 if row["step"] == 1 else 0.2)
    assert list((finished.folder / "runs/first/tensorboard").glob("events.*"))


def test_run_folder_is_complete(finished: Run) -> None:
    folder = finished.folder / "runs/first"
    for name in (
        "config.toml",
        "manifest.json",
        "metrics.jsonl",
        "league.sqlite",
        "episodes",
        "checkpoints/5/trainer",
        "logs",
    ):
        assert (folder / name).exists(), name
    manifest = json.loads((folder / "manifest.json").read_text())
    assert manifest["status"] == "finished"
    assert manifest["model_digest"]


def test_adapters_load_unchanged_with_peft_and_generate(finished: Run, tiny_model: Path) -> None:
    import torch
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    base = AutoModelForCausalLM.from_pretrained(tiny_model)
    ids = torch.tensor([[5, 6, 7]])
    plain = base(ids).logits
    adapted = PeftModel.from_pretrained(base, str(finished.folder / "runs/first/adapters/pro/5"))
    assert (adapted(ids).logits - plain).abs().max() > 0
    assert (
        adapted.generate(input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=3, pad_token_id=0).shape[1]
        > 3
    )


def test_resume_of_a_finished_run_with_more_steps_goes_on(finished: Run) -> None:
    run = Run(finished.folder, "resume", "runs/first", "train.steps=6", "--json")
    assert run.wait() == 0, run.error_text()
    result = run.result()
    assert result["step"] == 6
    assert {a: tuple(v) for a, v in result["versions"].items()} == {"pro": (5, 6), "con": (5, 6)}


def test_two_runs_at_the_same_instant(tmp_path: Path) -> None:
    args = ("train", "--env", "kuhn-poker-v0", "train.steps=1", "--json", *TINY)
    runs = []
    for name in ("a b", "ö"):
        folder = tmp_path / name
        folder.mkdir()
        runs.append(Run(folder, *args, "name=same"))
    assert [r.wait() for r in runs] == [0, 0], [r.error_text() for r in runs]
    assert not still_alive([p for r in runs for p in r.descendants()])
