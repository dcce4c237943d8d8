"""An adapter from memory against the same adapter as vLLM itself loads it from disk."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from tests.policy_samples import adapter_config, random_adapter

from selfplay.process import RuntimeDir
from selfplay.store.adapters import AdapterStore
from selfplay.sync import save_adapter
from selfplay.types import PolicyVersion

pytestmark = pytest.mark.engine


def test_memory_equals_disk_bit_for_bit(tiny_model: Path, tmp_path: Path) -> None:
    """vLLM's own loading of the folder and ours from memory, in the dtype that rounds most."""
    runtime = RuntimeDir.create()
    try:
        AdapterStore(tmp_path).publish(
            PolicyVersion("pro", 0),
            lambda folder: save_adapter(folder, random_adapter(str(tiny_model), 1), adapter_config()),
            parent=None,
        )
        done = subprocess.run(
            [sys.executable, "-m", "tests.engine_disk", str(tiny_model), str(tmp_path), str(runtime.path)],
            capture_output=True, text=True, check=False, timeout=400, start_new_session=True,
        )  # fmt: skip
    finally:
        runtime.remove()
    assert done.returncode == 0, done.stderr[-3000:]
    memory, disk, base = json.loads(done.stdout.strip().splitlines()[-1])
    assert memory == disk
    assert memory != base
