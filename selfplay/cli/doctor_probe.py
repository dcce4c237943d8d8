"""What the heavy libraries say about themselves, asked in a separate process so that the asking one stays light.

In: nothing. Out: a `Probe`; an import that fails is a finding, not an error here.
"""

from __future__ import annotations

import shutil
import subprocess
import sys

import msgspec

_CODE = """
import json, torch, torch.distributed as dist
from transformers import AutoModelForCausalLM
import peft
print(json.dumps({
    "cuda_devices": torch.cuda.device_count() if torch.cuda.is_available() else 0,
    "gloo": dist.is_available() and dist.is_gloo_available(),
    "nccl": dist.is_available() and dist.is_nccl_available(),
}))
"""
_TIMEOUT_S = 300.0


class Probe(msgspec.Struct, frozen=True, kw_only=True):
    """Facts only an import can tell. ``error`` is the last line of a failed import."""

    cuda_devices: int = 0
    gloo: bool = False
    nccl: bool = False
    error: str = ""


def probe_libraries(code: str = _CODE) -> Probe:
    """Import torch, transformers and peft elsewhere and report."""
    try:
        done = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, timeout=_TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired:
        return Probe(error=f"importing torch and transformers took more than {_TIMEOUT_S:.0f} s")
    if done.returncode != 0:
        lines = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
        return Probe(error=lines[-1])
    return msgspec.json.decode(done.stdout.strip().splitlines()[-1], type=Probe)


def gpu_names() -> list[str]:
    """Name and memory of each NVIDIA GPU, as the driver tells it."""
    if shutil.which("nvidia-smi") is None:
        return []
    query = ["nvidia-smi", "--query-gpu=name,memory.total", "--format=csv,noheader"]
    listing = subprocess.run(query, capture_output=True, text=True, check=False)
    return [line.strip() for line in listing.stdout.splitlines() if line.strip()] if listing.returncode == 0 else []
