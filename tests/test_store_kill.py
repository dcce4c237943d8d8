"""Real processes killed with SIGKILL in the middle of writing: what was acknowledged is there, whole."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from selfplay.store.checkpoints import Checkpoints
from selfplay.store.episode_log import EpisodeLog

ROOT = Path(__file__).resolve().parent.parent
APPEND = """
import sys
from pathlib import Path
from selfplay.store.episode_log import EpisodeLog
log = EpisodeLog.open(Path(sys.argv[1]), write=True, say=print, segment_bytes=4000)
for i in range(100000):
    seq = log.append(b"%d " % i * 40)
    print(seq, flush=True)
"""
SAVE = """
import sys
from pathlib import Path
from selfplay.store.checkpoints import Checkpoints
from selfplay.store.state import RunState
checkpoints = Checkpoints(Path(sys.argv[1]), keep=2, say=print)
for step in range(1, 100000):
    with checkpoints.writing(RunState(step=step, versions={"a": step, "b": step, "c": step})) as folder:
        for agent in "abc":
            (folder / agent).write_bytes(b"%d" % step * 2000)
    print(step, flush=True)
"""


def kill_after(code: str, folder: Path, lines: int) -> int:
    """Run ``code``, SIGKILL it right after its ``lines``-th line, and return the last whole number it printed."""
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen([sys.executable, "-c", code, str(folder)], stdout=subprocess.PIPE, env=env) as process:
        assert process.stdout is not None
        printed = b"".join(process.stdout.readline() for _ in range(lines))
        process.send_signal(signal.SIGKILL)
        printed += process.stdout.read()
    return int(printed.split(b"\n")[-2])


@pytest.mark.parametrize("lines", [1, 7, 60, 133])
def test_no_acknowledged_episode_is_lost(tmp_path: Path, lines: int) -> None:
    acknowledged = kill_after(APPEND, tmp_path / "episodes", lines)
    assert acknowledged >= lines - 1
    with EpisodeLog.open(tmp_path / "episodes", write=True, say=lambda _: None) as log:
        found = [data for _, data in log.read_from(0)]
        assert log.append(b"next") == len(found)
    assert len(found) in (acknowledged + 1, acknowledged + 2)
    assert found == [b"%d " % i * 40 for i in range(len(found))]


@pytest.mark.parametrize("lines", [1, 2, 5, 11, 18])
def test_the_last_complete_checkpoint_stands_and_is_never_mixed(tmp_path: Path, lines: int) -> None:
    acknowledged = kill_after(SAVE, tmp_path, lines)
    said: list[str] = []
    checkpoint = Checkpoints(tmp_path, keep=2, say=said.append).latest()
    assert checkpoint is not None
    assert checkpoint.step in (acknowledged, acknowledged + 1)
    assert said == []
    for agent in "abc":
        assert (checkpoint.folder / agent).read_bytes() == b"%d" % checkpoint.step * 2000
        assert checkpoint.state.versions[agent] == checkpoint.step
