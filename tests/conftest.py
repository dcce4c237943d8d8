"""Shared by all tests: one thread per process, no network, warnings kept out of children, and nothing left behind."""

from __future__ import annotations

import json
import os
import shutil
import signal
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

# Before anything imports torch: two spinning OpenMP pools on few cores slow each other down tenfold.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("NO_COLOR", "1")

import hypothesis
import psutil
import pytest
from safetensors.numpy import load_file, save_file
from tests.runs import end_all

from selfplay.models import resolve_model

# A shell starts background jobs deaf to Ctrl-C, and their children would inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)

RUNTIME_VARIABLE = "SELFPLAY_RUNTIME_DIR"
GRACE_S = 60.0

# Time is never a reason to fail: machines are shared. The same examples every time, so that a failure can be repeated.
hypothesis.settings.register_profile(
    "selfplay", deadline=None, derandomize=True, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("selfplay")


@pytest.fixture(scope="session", autouse=True)
def nothing_left_behind() -> Iterator[None]:
    """Every runtime folder of the session lies in a place of its own, which must be empty in the end; and no process
    that was started with that place in its environment may still run, whoever its parent has become."""
    parent = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    place = Path(tempfile.mkdtemp(prefix="sp-test-", dir=parent))
    before = os.environ.get(RUNTIME_VARIABLE)
    os.environ[RUNTIME_VARIABLE] = str(place)
    try:
        yield
        left = _wait_until_clean(place)
    finally:
        if before is None:
            del os.environ[RUNTIME_VARIABLE]
        else:
            os.environ[RUNTIME_VARIABLE] = before
        shutil.rmtree(place, ignore_errors=True)
    if left:
        pytest.fail("the tests left behind:\n" + "\n".join(left))


@pytest.fixture(autouse=True)
def no_run_outlives_its_test() -> Iterator[None]:
    yield
    end_all()


def _wait_until_clean(place: Path) -> list[str]:
    deadline = time.monotonic() + GRACE_S
    while (left := [*_folders(place), *_processes(place)]) and time.monotonic() < deadline:
        time.sleep(0.1)
    return left


def _folders(place: Path) -> list[str]:
    return [f"runtime folder {p}" for p in place.iterdir()]


def _processes(place: Path) -> list[str]:
    found = []
    for process in psutil.process_iter():
        try:
            ours = process.pid != os.getpid() and process.environ().get(RUNTIME_VARIABLE) == str(place)
            command = " ".join(process.cmdline()) if ours else ""
            ended = ours and process.status() == psutil.STATUS_ZOMBIE
        except psutil.Error:
            continue
        # Python's own helper of multiprocessing lives as long as the test process does.
        if ours and not ended and "resource_tracker" not in command:
            found.append(f"process {process.pid}: {command[:200]}")
    return found


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the model called ``tiny``, in a cache of the session's own."""
    return resolve_model("tiny", cache_dir=tmp_path_factory.mktemp("models")).path


@pytest.fixture(scope="session")
def tied_model(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Path:
    """The tiny model, but its embedding is its output head as well."""
    folder = tmp_path_factory.mktemp("tied") / "model"
    shutil.copytree(tiny_model, folder)
    weights = load_file(folder / "model.safetensors")
    weights["model.embed_tokens.weight"] = weights.pop("lm_head.weight")
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    settings = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(settings | {"tie_word_embeddings": True}))
    return folder
