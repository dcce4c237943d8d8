"""What this machine computes with, found without loading torch or CUDA."""

from __future__ import annotations

import os
import shutil
from functools import cache
from pathlib import Path
from typing import Literal

_BFLOAT16_FLAGS = {"avx512_bf16", "amx_bf16", "bf16"}
"""CPU flags (x86, arm) of instructions that multiply bfloat16. Without them it is emulated, about ten times slower than float32."""


@cache
def has_gpu() -> bool:
    """Whether this machine has an NVIDIA driver."""
    return shutil.which("nvidia-smi") is not None


def visible_gpus() -> list[str]:
    """What ``CUDA_VISIBLE_DEVICES`` names, else the numbers of the NVIDIA devices of this machine."""
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    if named is not None:
        return [name for name in named.split(",") if name.strip()]
    return [str(i) for i in range(len(list(Path("/dev").glob("nvidia[0-9]*"))))]


@cache
def multiplies_bfloat16() -> bool:
    """Whether bfloat16 is fast here: on GPUs, and on CPUs with instructions for it."""
    return has_gpu() or bool(_BFLOAT16_FLAGS & cpu_flags())


def cpu_flags(cpuinfo: Path = Path("/proc/cpuinfo")) -> set[str]:
    """Feature flags of the first CPU; empty where the system does not tell."""
    try:
        lines = cpuinfo.read_text("utf-8", "replace").splitlines()
    except OSError:
        return set()
    return next(
        (set(line.partition(":")[2].split()) for line in lines if line.lower().startswith(("flags", "features"))), set()
    )


def auto_dtype(stored: Literal["float32", "bfloat16"]) -> Literal["float32", "bfloat16"]:
    """What ``dtype=auto`` means for a model stored in ``stored``: that, unless this machine only emulates it."""
    return "bfloat16" if stored == "bfloat16" and multiplies_bfloat16() else "float32"
