"""One run that is killed, interrupted and disturbed in every part: bounded, clear, and resumable with nothing acknowledged lost.

Each test takes the run as the one before has left it, goes on with it (by ``selfplay resume``, after the first) and holds what
goes on against what was acknowledged; alone, a test starts a run of its own.
"""

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

START = ("train", "--env", "debate-v0", "train.steps=400", "name=r", "--json", *TINY)
TRY_AGAIN = "serves on; try 2 of 10 follows"


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the run lives."""
    return tmp_path_factory.mktemp("life")


def stored(folder: Path) -> list[str]:
    """Episode ids in the log, in order."""
    with EpisodeLog.open(folder / "runs/r/episodes", write=False, say=lambda _: None) as log:
        return [episode.episode_id for _, episode in log.episodes()]


def newest_step(folder: Path) -> int:
    return max(int(p.name) for p in (folder / "runs/r/checkpoints").iterdir() if p.name.isdigit())


def go_on(folder: Path, *more: str, steps: int = 2) -> Run:
    """The run under way again, ``steps`` steps beyond its newest checkpoint, with all it had acknowledged."""
    if not (folder / "runs/r").exists():
        run = Run(folder, *START, *more)
        run.until_step(steps)
        return run
    acknowledged, newest = stored(folder), newest_step(folder)
    versions = load_checkpoint(folder / f"runs/r/checkpoints/{newest}").state.versions
    run = Run(folder, "resume", "runs/r", "--json", *more)
    run.until_step(newest + steps)
    assert stored(folder)[: len(acknowledged)] == acknowledged
    with EpisodeLog.open(folder / "runs/r/episodes", write=False, say=lambda _: None) as log:
        played = [episode.versions() for _, episode in log.episodes(len(acknowledged))]
    # What is played after a resume is played by the versions that were trained so far, not by the base or the first ones.
    assert all(v[a][0] >= n for v in played for a, n in versions.items() if a in v)
    return run


def check_ledger(run: Run) -> None:
    counts = run.result()["accounting"]
    lost = sum(sum(counts[k].values()) for k in ("failed", "void", "dropped"))
    assert counts["started"] == counts["stored"] + counts["in_flight"] + lost
    ids = stored(run.folder)
    assert len({i.split(".")[0] for i in ids}) == len(ids) == counts["stored"], "no game twice"


def fails_to_sync_while_suspended(run: Run) -> bool:
    """Suspend the policy server for some seconds: a sync fails, unless training had too few episodes to come to one."""
    server = run.child("policy")
    server.suspend()
    try:
        for _ in range(60):
            if TRY_AGAIN in run.error_text():
                return True
            time.sleep(0.1)
        return False
    finally:
        server.resume()


def test_a_failed_sync_and_a_killed_worker_are_survived_and_ctrl_c_saves(place: Path) -> None:
    """The old version serves on and the next try succeeds; the worker costs its episodes only; nothing is left behind."""
    before = runtime_folders()
    run = go_on(place, "sync.timeout_s=1", "sync.retries=9")
    step = 2
    while not fails_to_sync_while_suspended(run):
        step += 1
        run.until_step(step)
    run.until_step(step + 2)
    run.kill("worker")
    run.until(lambda text: "SIGKILL" in text)
    run.until_step(max(json.loads(line)["step"] for line in metrics(place)) + 2)
    children = run.descendants()
    run.process.send_signal(signal.SIGINT)
    assert run.wait(60) == 130, run.error_text()
    assert run.result()["outcome"] == "interrupted"
    assert not still_alive(children)
    assert runtime_folders() <= before
    assert "Traceback" not in run.error_text()
    check_ledger(run)
    rows = [json.loads(line) for line in metrics(place)]
    assert max(row[f"agents/{agent}/sync_tries"] for row in rows for agent in ("pro", "con")) > 1
    assert max(row["staleness_max"] for row in rows) <= 1, "training waits for what it publishes"


def metrics(folder: Path) -> list[str]:
    return (folder / "runs/r/metrics.jsonl").read_text().splitlines()


@pytest.mark.parametrize(
    ("victim", "modes"),
    [("rank", ()), ("policy", ("sync.interrupt=blocking", "rollout.partial=abort_resume"))],
    ids=["rank", "policy-blocking-abort_resume"],
)
def test_a_killed_policy_server_or_rank_ends_the_run(place: Path, victim: str, modes: tuple[str, ...]) -> None:
    """The server also where everybody is stopped for every version, and answers go on under it from the tokens they have."""
    before = runtime_folders()
    run = go_on(place, *modes)
    children = run.descendants()
    run.kill(victim)
    assert run.wait(60) == 1
    assert "SIGKILL" in run.error_text()
    assert "selfplay resume" in run.error_text()
    assert "Traceback" not in run.error_text()
    assert not still_alive(children)
    assert runtime_folders() <= before


def test_a_killed_controller_leaves_nothing(place: Path) -> None:
    before = runtime_folders()
    run = go_on(place)
    children = run.descendants()
    run.process.send_signal(signal.SIGKILL)
    run.process.wait()
    assert not still_alive(children)
    assert runtime_folders() <= before


def test_a_remote_pool_plays_and_leaves_and_ctrl_c_twice_leaves_at_once(place: Path) -> None:
    before = runtime_folders()
    assert Run(place, "pool", "keys", "allowed/alice").wait() == 0
    run = go_on(place, "remote.listen=tcp://127.0.0.1:0", "remote.allow=allowed")
    address = run.error_text().rsplit("remote pools may join at ", 1)[1].split()[0]
    (place / "pool").mkdir()
    pool = Run(
        place / "pool", "pool", "--connect", address, "--env", "debate-v0", "--key", "../allowed/alice.key_secret",
        "--server", "../runs/r/keys/run.key", "--json",
    )  # fmt: skip
    pool.until(lambda text: "games played" in text)
    pool.process.send_signal(signal.SIGINT)
    assert pool.wait() == 0, pool.error_text()
    played = pool.result()["played"]
    ended = "it was told to leave, and has finished its games"
    assert pool.result() == {"name": "alice-1", "played": played, "failed": 0, "ended": ended}
    run.until(lambda text: f"remote pool alice-1 left after {played} games" in text)
    children = run.descendants()
    run.process.send_signal(signal.SIGINT)
    run.process.send_signal(signal.SIGINT)
    assert run.wait(30) == 130, run.error_text()
    assert "Traceback" not in run.error_text()
    assert not still_alive(children)
    assert runtime_folders() <= before


def test_after_all_that_it_comes_to_its_end(place: Path) -> None:
    end = newest_step(place) + 2 if (place / "runs/r").exists() else 4
    run = go_on(place, f"train.steps={end}", steps=1)
    assert run.wait() == 0, run.error_text()
    assert run.result()["step"] == end
    check_ledger(run)


def test_a_stall_says_what_is_waited_for_and_who_holds_which_game(tmp_path: Path) -> None:
    run = go_on(tmp_path, "policy.engine=transformers", "stall_timeout_s=2")
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
