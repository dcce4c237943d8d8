"""A whole training with a remote pool, both from the shell as documented: keys, join, play, leave, and the books."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from runs import TINY, Run

pytestmark = pytest.mark.engine


def test_a_training_is_joined_and_left(tmp_path: Path) -> None:
    for name in ("keys/run", "keys/allowed/alice"):
        assert Run(tmp_path, "pool", "keys", name).wait() == 0
    run = Run(
        tmp_path, "train", "--env", "kuhn-poker-v0", "train.steps=1000", "name=r", "--json", *TINY,
        "remote.listen=tcp://127.0.0.1:0", "remote.key=keys/run.key_secret", "remote.allow=keys/allowed",
    )  # fmt: skip
    run.until(lambda text: "remote pools may join at" in text)
    address = run.error_text().split("may join at ")[1].split()[0]
    folder = tmp_path / "pool"
    folder.mkdir()
    pool = Run(
        folder, "pool", "--connect", address, "--env", "kuhn-poker-v0", "--key", "../keys/allowed/alice.key_secret",
        "--server", "../keys/run.key", "--json",
    )  # fmt: skip
    pool.until(lambda text: "games played" in text)
    pool.process.send_signal(signal.SIGINT)
    assert pool.wait() == 0, pool.error_text()
    assert pool.result()["name"] == "alice-1"
    assert pool.result()["played"] > 0
    assert pool.result()["failed"] == 0
    run.until(lambda text: f"alice-1 left after {pool.result()['played']} games" in text)
    run.process.send_signal(signal.SIGINT)
    assert run.wait() == 130, run.error_text()
    counts = run.result()["accounting"]
    lost = sum(sum(counts[k].values()) for k in ("failed", "void", "dropped"))
    assert counts["started"] == counts["stored"] + counts["in_flight"] + lost
    assert counts["stored"] >= pool.result()["played"]
    assert counts["failed"] == {}
