"""A warm start that is stopped at any moment: whole or not there, told as what it is, and begun anew by a resume."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import msgspec
import psutil
import pytest
from tests.runs import TINY, Run

from selfplay.cli.view import PlainView
from selfplay.config import Config, load_config
from selfplay.errors import StoreError, UserError
from selfplay.launch.commands import _warm, start_run
from selfplay.launch.plan import plan_run
from selfplay.launch.warm_start import FOLDER, RECORD, WarmStartJob, warm_start
from selfplay.models import ResolvedModel, resolve_model
from selfplay.store.manifest import new_manifest
from selfplay.store.run_folder import RunFolder

KUHN = "kuhn-poker-v0"
FEW = ("warm_start.steps=2", "warm_start.episodes=5", "warm_start.batch=4")
LONG = ("warm_start.steps=80", "warm_start.episodes=20", "policy.engine=transformers", "train.steps=1")
BEGUN = "warm start: step 0/"
KILLED_BEFORE_THE_RECORD = """
import os, signal, sys
from selfplay.launch import warm_start
warm_start.write_bytes = lambda path, data: os.kill(os.getpid(), signal.SIGKILL)
warm_start.main(sys.argv[1])
"""


def settings(*overrides: str) -> Config:
    return load_config(None, [f"env={KUHN}", "model=tiny", "policy.engine=transformers", *FEW, *overrides])


def job(base: ResolvedModel, target: Path) -> WarmStartJob:
    return WarmStartJob(config=settings(), model="tiny", digest=base.digest, source=str(base.path), target=str(target))


def new_run(place: Path, config: Config) -> RunFolder:
    return RunFolder.create(place, "r", config, new_manifest(config, name="r", env_source="selfplay 0"))


def test_a_kill_before_the_record_leaves_no_folder(tmp_path: Path) -> None:
    base, target = resolve_model("tiny"), tmp_path / FOLDER
    command = [sys.executable, "-c", KILLED_BEFORE_THE_RECORD, msgspec.json.encode(job(base, target)).decode()]
    child = subprocess.Popen(command, stdin=subprocess.PIPE)
    assert child.wait(300) == -signal.SIGKILL
    assert child.stdin is not None
    child.stdin.close()
    assert not target.exists()
    _, record = warm_start(settings(), base, target, print)
    assert record["steps"] == 2


def test_a_folder_without_its_record_is_made_again(tmp_path: Path) -> None:
    config = settings()
    plan = plan_run(config, print)
    with new_run(tmp_path, config) as run:
        (run.path / FOLDER).mkdir()
        (run.path / FOLDER / "config.json").write_text("{}")
        warmed = _warm(plan, run, PlainView())
        assert warmed.serving.model.path == run.path / FOLDER
        assert run.manifest().warm_start["digest"] == warmed.serving.model.digest
        (run.path / FOLDER / RECORD).unlink()
        with pytest.raises(StoreError, match=r"missing or damaged: the adapters of this run belong on the base"):
            _warm(plan, run, PlainView())
        assert (run.path / FOLDER / "model.safetensors").is_file()


def test_the_record_says_how_to_make_the_model_again(tmp_path: Path) -> None:
    base = resolve_model("tiny")
    habit = ("warm_start.options.habit=0.5", "warm_start.lr=1e-3", "seats.player_0.options.history=last")
    first, record = warm_start(settings(*habit), base, tmp_path / "a", print)
    asked = {
        "source": "tiny", "source_digest": base.digest, "lr": 1e-3, "batch": 4, "episodes": 5, "steps": 2, "seed": 0,
        "player": "random", "options.habit": 0.5, "seats.player_0.options.history": "last",
    }  # fmt: skip
    assert asked.items() <= record.items()
    second, again = warm_start(settings(), first, tmp_path / "b", print)
    assert again["source_digest"] == first.digest, "its own record, not the one that its source had"
    assert second.digest != first.digest


def test_a_folder_that_cannot_be_written_is_a_fault_of_the_disk(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(StoreError, match=r"^the warm start failed \(exit 3\): cannot write or read"):
        warm_start(settings(), resolve_model("tiny"), tmp_path / "file" / "warm", print)


def test_what_the_user_asked_wrongly_stays_the_users_mistake(tmp_path: Path) -> None:
    config = settings("rollout.max_tokens=2", f"runs_dir={tmp_path}", "name=r")
    with pytest.raises(UserError, match=r"set rollout\.max_tokens="):
        start_run(config, PlainView())
    status, reason = RunFolder.open(tmp_path / "r").status()
    assert status == "failed"
    assert "set rollout.max_tokens=" in reason


def learner(run: Run) -> psutil.Process:
    """The warm start's own process."""
    return next(p for p in run.descendants() if "selfplay.launch.warm_start" in p.cmdline())


@pytest.mark.engine
def test_killed_then_interrupted_then_resumed_to_the_end(tmp_path: Path) -> None:
    run = Run(tmp_path, "train", "--env", KUHN, "name=r", "--json", *TINY, *LONG)
    run.until(lambda text: BEGUN in text)
    learner(run).kill()
    assert run.wait() == 1
    last = run.error_text().strip().splitlines()[-2:]
    assert "the warm start failed (ended by SIGKILL)" in last[0]
    assert last[1] == "continue with  selfplay resume runs/r"
    assert RunFolder.open(tmp_path / "runs/r").status()[0] == "failed"

    run = Run(tmp_path, "resume", "runs/r", "--json")
    run.until(lambda text: BEGUN in text)
    child = learner(run)
    run.process.send_signal(signal.SIGTERM)  # what Ctrl-C does too (tests/test_cli_main.py)
    assert run.wait() == 130
    assert not child.is_running()
    assert "begin it anew with  selfplay resume runs/r" in run.error_text()
    assert RunFolder.open(tmp_path / "runs/r").status()[0] == "interrupted"

    run = Run(tmp_path, "resume", "runs/r", "--json")
    assert run.wait() == 0, run.error_text()
    folder = RunFolder.open(tmp_path / "runs/r")
    assert folder.status()[0] == "finished"
    assert folder.manifest().warm_start["steps"] == 80
