"""Runs that are killed, interrupted or lose a process: bounded, clear, and resumable with nothing acknowledged lost."""

from __future__ import annotations

import json
import signal
import time
from pathlib import Path

import pytest
from tests.runs import TINY, Run, runtime_folders, still_alive

from selfplay.store.checkpoints import load_checkpoint
from selfplay.store.episode_log import EpisodeLog

pytestmark = pytest.mark.engine

LONG = ("train", "--env", "debate-v0", "train.steps=400", "name=r", "--json", *TINY)


def start(folder: Path, *more: str) -> Run:
    run = Run(folder, *LONG, *more)
    run.until_step(2)
    return run


def stored(folder: Path) -> list[str]:
    """Episode ids in the log, in order."""
    with EpisodeLog.open(folder / "runs/r/episodes", write=False, say=lambda _: None) as log:
        return [episode.episode_id for _, episode in log.episodes()]


def resume(folder: Path, extra_steps: int = 1) -> Run:
    """Go on to ``extra_steps`` beyond the newest checkpoint."""
    newest = max(int(p.name) for p in (folder / "runs/r/checkpoints").iterdir() if p.name.isdigit())
    versions = load_checkpoint(folder / f"runs/r/checkpoints/{newest}").state.versions
    num_before = len(stored(folder))
    run = Run(folder, "resume", "runs/r", f"train.steps={newest + extra_steps}", "--json")
    assert run.wait() == 0, run.error_text()
    assert run.result()["step"] == newest + extra_steps
    with EpisodeLog.open(folder / "runs/r/episodes", write=False, say=lambda _: None) as log:
        played = [episode.versions() for _, episode in log.episodes(num_before)]
    # What is played after a resume is played by the versions that were trained so far, not by the base or the first ones.
    assert all(v[a][0] >= n for v in played for a, n in versions.items() if a in v)
    return run


def check_ledger(run: Run) -> None:
    counts = run.result()["accounting"]
    lost = sum(sum(counts[k].values()) for k in ("failed", "void", "dropped"))
    assert counts["started"] == counts["stored"] + counts["in_flight"] + lost


def test_killed_worker_costs_its_episodes_only(tmp_path: Path) -> None:
    run = start(tmp_path, "train.steps=8")
    run.kill("worker")
    assert run.wait() == 0, run.error_text()
    check_ledger(run)
    ids = stored(tmp_path)
    assert len({i.split(".")[0] for i in ids}) == len(ids) == run.result()["accounting"]["stored"]


@pytest.mark.parametrize("victim", ["policy", "rank"])
def test_killed_policy_server_or_rank_ends_the_run_and_resume_goes_on(tmp_path: Path, victim: str) -> None:
    before = runtime_folders()
    run = start(tmp_path)
    children = run.descendants()
    run.kill(victim)
    assert run.wait(60) == 1
    assert "SIGKILL" in run.error_text()
    assert "selfplay resume" in run.error_text()
    assert "Traceback" not in run.error_text()
    assert not still_alive(children)
    assert runtime_folders() <= before
    acknowledged = stored(tmp_path)
    again = resume(tmp_path)
    check_ledger(again)
    assert stored(tmp_path)[: len(acknowledged)] == acknowledged


def test_killed_controller_leaves_nothing_and_resume_goes_on(tmp_path: Path) -> None:
    before = runtime_folders()
    run = start(tmp_path)
    children = run.descendants()
    run.process.send_signal(signal.SIGKILL)
    run.process.wait()
    assert not still_alive(children)
    assert runtime_folders() <= before
    acknowledged = stored(tmp_path)
    again = resume(tmp_path, extra_steps=2)
    check_ledger(again)
    ids = stored(tmp_path)
    assert ids[: len(acknowledged)] == acknowledged
    assert len({i.split(".")[0] for i in ids}) == len(ids)


def test_ctrl_c_once_saves_and_leaves_cleanly(tmp_path: Path) -> None:
    before = runtime_folders()
    run = start(tmp_path)
    children = run.descendants()
    run.process.send_signal(signal.SIGINT)
    assert run.wait(60) == 130, run.error_text()
    assert run.result()["outcome"] == "interrupted"
    assert not still_alive(children)
    assert runtime_folders() <= before
    resume(tmp_path)


def test_ctrl_c_twice_leaves_at_once(tmp_path: Path) -> None:
    before = runtime_folders()
    run = start(tmp_path)
    children = run.descendants()
    run.process.send_signal(signal.SIGINT)
    run.process.send_signal(signal.SIGINT)
    assert run.wait(30) == 130, run.error_text()
    assert "Traceback" not in run.error_text()
    assert not still_alive(children)
    assert runtime_folders() <= before


def test_a_sync_that_fails_is_said_and_survived(tmp_path: Path) -> None:
    """The policy server stands still for longer than a sync may take: the old version serves on, the next try succeeds."""
    run = Run(tmp_path, *LONG, "train.steps=12", "sync.timeout_s=1", "sync.retries=9")
    for step in range(2, 12):
        run.until_step(step)
        if failed_while_suspended(run):
            break
    assert run.wait() == 0, run.error_text()
    assert "serves on; try 2 of 10 follows" in run.error_text()
    assert {a: v[1] for a, v in run.result()["versions"].items()} == {"pro": 12, "con": 12}
    assert "Traceback" not in run.error_text()
    check_ledger(run)
    rows = [json.loads(line) for line in (tmp_path / "runs/r/metrics.jsonl").read_text().splitlines()]
    assert max(row[f"agents/{agent}/sync_tries"] for row in rows for agent in ("pro", "con")) > 1
    assert max(row["staleness_max"] for row in rows) <= 1, "training waits for what it publishes"


def failed_while_suspended(run: Run) -> bool:
    """Suspend the policy server for some seconds: a sync fails, unless training had too few episodes to come to one."""
    server = run.child("policy")
    server.suspend()
    try:
        for _ in range(60):
            if "serves on; try 2 of 10 follows" in run.error_text():
                return True
            time.sleep(0.1)
        return False
    finally:
        server.resume()


def test_a_stall_says_what_is_waited_for_and_who_holds_which_game(tmp_path: Path) -> None:
    run = start(tmp_path, "policy.engine=transformers", "stall_timeout_s=2")
    children = run.descendants()
    run.child("worker").suspend()
    assert run.wait(60) == 1
    said = run.error_text()
    assert "no progress for 2 s while waiting for episodes" in said
    assert "4 episodes to train on (" in said
    assert "at env-0-" in said
    assert "selfplay resume" in said
    assert "Traceback" not in said
    assert not still_alive(children)
