"""vLLM in a program of its own: an adapter from memory against vLLM's own loading from disk, and the base after many versions."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.policy_samples import adapter_config, random_adapter

from selfplay.process import RuntimeDir
from selfplay.store.adapters import AdapterStore
from selfplay.sync import save_adapter
from selfplay.types import PolicyVersion

pytestmark = pytest.mark.engine

NUM_VERSIONS = 100


@pytest.fixture(scope="module")
def found(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What `tests.engine_disk` prints."""
    runtime, place = RuntimeDir.create(), tmp_path_factory.mktemp("adapters")
    try:
        for number in (0, 1):
            AdapterStore(place).publish(
                PolicyVersion("pro", number),
                lambda folder, seed=number: save_adapter(
                    folder, random_adapter(str(tiny_model), seed), adapter_config()
                ),  # type: ignore[misc]
                parent=None,
            )
        done = subprocess.run(
            [sys.executable, "-m", "tests.engine_disk", str(tiny_model), str(place), str(runtime.path), str(NUM_VERSIONS)],
            capture_output=True, text=True, check=False, timeout=400, start_new_session=True,
        )  # fmt: skip
    finally:
        runtime.remove()
    assert done.returncode == 0, done.stderr[-3000:]
    loaded: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return loaded


def test_memory_equals_disk_bit_for_bit(found: dict[str, Any]) -> None:
    """vLLM's own loading of the folder and ours from memory, in the dtype that rounds most."""
    assert found["memory"] == found["disk"]
    assert found["memory"] != found["base"]


def test_a_hundred_versions_leave_the_base_of_vllm_as_it_was(found: dict[str, Any]) -> None:
    """Its weights are hashed inside the worker; every version answers as the first of its adapter did."""
    assert (found["before"], found["different"]) == (found["after"], 0)
