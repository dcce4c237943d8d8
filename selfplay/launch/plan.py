"""Everything about a run that is known before anything heavy starts: checked config, environment, agents, model.

In: a config. Out: a `RunPlan`, or a `UserError` of one line. No model is loaded and no process of the run started.
"""

from __future__ import annotations

import importlib.util
import shutil
from collections.abc import Callable
from typing import Literal

import msgspec

from selfplay.config import Config
from selfplay.config.derive import check_adapter_slots, check_config, resolve_transport
from selfplay.controller.publisher import Transport
from selfplay.errors import ConfigError, MissingExtraError
from selfplay.league import Matchmaker
from selfplay.models import ResolvedModel, resolve_model
from selfplay.registry import AGENTS, EnvironmentSpec, describe, list_entries
from selfplay.scoring import Algorithm, load_algorithm
from selfplay.types import PolicyVersion

PROBE_BOUND: dict[str, float] = {"float32": 0.02, "bfloat16": 0.15}
"""Mean |Δlogprob| between trainer and engine that is still rounding, by dtype of the base."""


class RunPlan(msgspec.Struct, frozen=True, kw_only=True):
    """What will run."""

    config: Config
    spec: EnvironmentSpec
    matchmaker: Matchmaker
    algorithm: Algorithm
    model: ResolvedModel
    agents: tuple[str, ...]
    """Trained agents, sorted."""
    frozen: tuple[PolicyVersion, ...]
    """Frozen versions that play or judge."""
    slots: int
    """Adapter versions the engine holds at once."""
    engine: Literal["vllm", "transformers"]
    transport: Transport
    dtype: Literal["float32", "bfloat16"]
    """Of the served base."""
    train_dtype: Literal["float32", "bfloat16"]
    device: Literal["cpu", "cuda"]
    max_model_len: int
    max_move_tokens: int


def plan_run(config: Config, say: Callable[[str], None]) -> RunPlan:
    """Check everything that can be checked early. ``say`` hears of what takes seconds."""
    check_config(config)
    algorithm = load_algorithm(config.algorithm)
    spec = describe(config.env, dict(config.env_params))
    if spec.id != config.env:
        say(f"environment {config.env} is {spec.id}")
    matchmaker = Matchmaker(spec, config, known_players=[e.id for e in list_entries(AGENTS)])
    has_gpu = shutil.which("nvidia-smi") is not None
    engine = _engine(config)
    _require("torch", "train", "training")
    trained, frozen = matchmaker.trained_agents, matchmaker.frozen_versions
    slots = check_adapter_slots(config, num_trained=len(trained), num_frozen=len(frozen))
    transport = resolve_transport(config, has_gpu=has_gpu)
    model = resolve_model(config.model, say=say)
    _check_targets(config, model)
    dtype = model.default_dtype if config.policy.dtype == "auto" else config.policy.dtype
    return RunPlan(
        config=config, spec=spec, matchmaker=matchmaker, algorithm=algorithm, model=model,
        agents=trained, frozen=frozen, slots=slots, engine=engine, transport=transport,
        dtype=dtype, train_dtype=dtype if config.train.dtype == "auto" else config.train.dtype,
        device="cuda" if has_gpu else "cpu", max_model_len=min(config.policy.max_model_len, model.max_position_embeddings),
        max_move_tokens=config.rollout.max_tokens or spec.max_move_tokens,
    )  # fmt: skip


def _engine(config: Config) -> Literal["vllm", "transformers"]:
    """vllm or transformers; ``auto`` takes vllm where it is installed."""
    if config.policy.engine == "auto":
        return "vllm" if importlib.util.find_spec("vllm") else "transformers"
    _require(
        config.policy.engine,
        "vllm-cpu" if config.policy.engine == "vllm" else "train",
        f"policy.engine={config.policy.engine}",
    )
    return config.policy.engine


def _require(package: str, extra: str, feature: str) -> None:
    if importlib.util.find_spec(package) is None:
        raise MissingExtraError(feature, extra, package)


def _check_targets(config: Config, model: ResolvedModel) -> None:
    for target in config.lora.targets:
        if target not in model.linear_names:
            raise ConfigError(
                f"lora.targets: model {model.name} has no {target}; it has {', '.join(model.linear_names)}"
            )
