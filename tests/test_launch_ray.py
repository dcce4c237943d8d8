"""The Ray launcher on a real Ray: a whole run that loses a worker, and a host without room."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.runs import TINY, Run, runtime_folders, still_alive

from selfplay.config import Config
from selfplay.config.schema import LaunchConfig, TrainConfig
from selfplay.errors import RunError
from selfplay.launch.ray_cluster import RayLauncher

pytestmark = pytest.mark.engine


def test_a_run_under_ray_survives_a_lost_worker_and_leaves_nothing(tmp_path: Path) -> None:
    before = runtime_folders()
    run = Run(
        tmp_path, "train", "--env", "debate-v0", "name=r", "launch.orchestration=ray", "train.steps=5", "--json", *TINY
    )
    run.until_step(1)
    processes = run.descendants()
    assert any("raylet" in p.name() for p in processes)
    run.kill("worker")
    assert run.wait(300) == 0, run.error_text()
    result = run.result()
    assert result["step"] == 5
    assert sum(result["accounting"]["void"].values()) > 0  # what the lost worker held
    assert all(new > old for old, new in result["versions"].values())
    assert still_alive(processes) == []
    assert runtime_folders() == before


def test_a_host_without_room_is_named_with_what_was_asked_for() -> None:
    config = Config(env="nim-v0", launch=LaunchConfig(start_timeout_s=2.0), train=TrainConfig(ranks=64))
    with (
        pytest.raises(RunError, match=r"no room for 66 CPUs and 65 GPUs on this host within 2 s"),
        RayLauncher.open(config, device="cuda", num_engines=1),
    ):
        raise AssertionError("it was opened")
