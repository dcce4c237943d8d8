"""Environment variables of the policy server's process, set before torch or vLLM is imported."""

from __future__ import annotations

import os

from selfplay.models.machine import has_gpu, visible_gpus
from selfplay.policy.settings import PolicyServerConfig

LOOPBACK = "127.0.0.1"


def engine_environment(config: PolicyServerConfig) -> dict[str, str]:
    """The variables, by name; they replace what the user's environment says."""
    return {
        # Off-line is the attitude, and nobody is told that this runs.
        "HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "HF_HUB_DISABLE_TELEMETRY": "1",
        "VLLM_NO_USAGE_STATS": "1", "VLLM_DO_NOT_TRACK": "1", "DO_NOT_TRACK": "1",
        # Every listener on loopback; sockets and temporary files where the run cleans up.
        "VLLM_HOST_IP": LOOPBACK, "VLLM_LOOPBACK_IP": LOOPBACK, "GLOO_SOCKET_IFNAME": "lo",
        "VLLM_RPC_BASE_PATH": config.runtime_dir, "TMPDIR": config.runtime_dir,
        # One process holds engine loop and worker: nothing else to orphan, and half the start.
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        # Threads that spin while they wait slow everybody else on the machine down many times.
        "OMP_NUM_THREADS": str(config.threads), "OMP_WAIT_POLICY": "PASSIVE", "TOKENIZERS_PARALLELISM": "false",
        **_eager_on_cpu(), **_own_gpu(config.device_index),
        "VLLM_LOGGING_LEVEL": os.environ.get("VLLM_LOGGING_LEVEL", "WARNING"), "VLLM_LOGGING_COLOR": "0",
    }  # fmt: skip


def _eager_on_cpu() -> dict[str, str]:
    """vLLM runs eagerly on a CPU, and yet compiles one helper of its sampler at the first request: half a minute for nothing."""
    return {} if has_gpu() else {"TORCHDYNAMO_DISABLE": "1"}


def _own_gpu(index: int) -> dict[str, str]:
    """Further engines take further GPUs; the first one sees what this process sees."""
    gpus = visible_gpus() if index else []
    return {"CUDA_VISIBLE_DEVICES": gpus[index % len(gpus)]} if gpus else {}


def apply(config: PolicyServerConfig) -> None:
    """Set the variables for this process and its children."""
    os.environ.update(engine_environment(config))
