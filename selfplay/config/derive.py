"""What follows from a config, and the combinations that cannot work: refused before any model is loaded.

In: a typed `Config`. Out: derived numbers, or a `ConfigError` of one line with the arithmetic and the remedy.
"""

from __future__ import annotations

import math
from typing import Literal

import msgspec

from selfplay.config.schema import AgentConfig, BufferConfig, Config, LoraConfig
from selfplay.errors import ConfigError, suggestion
from selfplay.types import PolicyVersion, check_name

PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
"""Projections of a decoder layer that trainer and engine both know how to adapt."""

MAX_FULL_PARAMETERS = 16_000_000
"""Parameters of the largest model that agents may train whole: 64 MB a copy in float32. A trainer holds five copies per agent, an
engine twice the live versions and a few."""


def resolve_transport(config: Config, *, has_gpu: bool) -> Literal["nccl", "gloo", "shm", "file"]:
    """The weight transport of this run: ``auto`` is nccl on GPUs and gloo on CPU. Raises `ConfigError` for nccl without a GPU."""
    chosen = config.sync.transport
    if chosen == "auto":
        return "nccl" if has_gpu else "gloo"
    if chosen == "nccl" and not has_gpu:
        raise ConfigError("sync.transport=nccl needs a GPU and there is none here: use gloo, shm, file or auto")
    return chosen


def version_lag(buffer: BufferConfig) -> int:
    """The largest staleness an episode can have when it is trained on; ``buffer`` has passed `check_config`.

    So many batches may also be started before the oldest is trained on: with more, games would be played to be dropped.
    """
    limits = [n for n in (buffer.depth, buffer.max_staleness) if isinstance(n, int)]
    return min(limits)


def awaited_lag(buffer: BufferConfig) -> int | None:
    """The staleness at which a step waits for a game; None: an unbounded stream waits for none."""
    return version_lag(buffer) if isinstance(buffer.depth, int) else None


def live_adapter_slots(num_trained: int, lag: int, num_frozen: int) -> int:
    """Adapter versions an engine must hold at once.

    Per trained agent: the current version, ``lag`` older ones that games in flight still use, and the one being
    installed; and every frozen version.
    """
    return num_trained * (lag + 2) + num_frozen


def agent_lora(config: Config, agent: str) -> LoraConfig:
    """The adapter of one agent: ``lora``, with what ``agents.NAME`` says differently."""
    own = config.agents.get(agent, AgentConfig())
    return msgspec.structs.replace(
        config.lora, rank=own.rank or config.lora.rank, alpha=own.alpha or config.lora.alpha,
        targets=own.targets or config.lora.targets, rslora=config.lora.rslora if own.rslora is None else own.rslora,
    )  # fmt: skip


def all_loras(config: Config) -> dict[str, LoraConfig]:
    """Config section → the adapter it describes: ``lora`` itself and every agent that differs."""
    return {"lora": config.lora} | {f"agents.{agent}": agent_lora(config, agent) for agent in config.agents}


def engine_rank(config: Config) -> int:
    """The LoRA rank the engine is sized for: the largest of all agents'."""
    return config.policy.max_rank or max(lora.rank for lora in all_loras(config).values())


def engine_targets(config: Config) -> tuple[str, ...]:
    """Every projection that some agent's adapter changes, in the order of the model's layers."""
    wanted = {target for lora in all_loras(config).values() for target in lora.targets}
    return tuple(t for t in PROJECTIONS if t in wanted)


def check_adapter_slots(config: Config, *, num_trained: int, num_frozen: int) -> int:
    """The adapter slots of this run; raises `ConfigError` when ``policy.max_live_adapters`` is set below the need."""
    lag = version_lag(config.buffer)
    needed = live_adapter_slots(num_trained, lag, num_frozen)
    limit = config.policy.max_live_adapters
    if limit and limit < needed:
        raise ConfigError(
            f"policy.max_live_adapters={limit} is too few: {num_trained} trained agents × (version lag {lag} + 2)"
            f" + {num_frozen} frozen = {needed}; raise it, or set 0 to derive it"
        )
    return limit or needed


def check_config(config: Config) -> None:
    """Raise `ConfigError` for the first setting or combination that can never run."""
    _check_env(config)
    _check_lora(config)
    _check_full(config)
    _check_optimizer(config)
    _check_algorithm(config)
    _check_buffer(config)
    _check_modes(config)
    _check_rollout(config)
    _check_jury(config)
    for name in config.agents:
        check_name(name, "agent")


def _check_env(config: Config) -> None:
    if not config.env.strip():
        raise ConfigError(
            "env is empty: name an environment, for example --env debate-v0 (selfplay env list shows all)"
        )
    if not config.model.strip():
        raise ConfigError("model is empty: name one, for example model=smollm2-135m or model=tiny")


def _check_lora(config: Config) -> None:
    for section, lora in all_loras(config).items():
        max_rank = config.policy.max_rank
        if max_rank and lora.rank > max_rank:
            raise ConfigError(
                f"{section}.rank={lora.rank} is above policy.max_rank={max_rank}: lower the one or raise the other"
            )
        if not lora.targets:
            raise ConfigError(
                f"{section}.targets is empty: there would be nothing to train; choose among {', '.join(PROJECTIONS)}"
            )
        for target in lora.targets:
            if target not in PROJECTIONS:
                raise ConfigError(f"{section}.targets: unknown projection {target!r}{suggestion(target, PROJECTIONS)}")
        if len(set(lora.targets)) < len(lora.targets):
            raise ConfigError(f"{section}.targets names a projection twice: {', '.join(lora.targets)}")


def _check_full(config: Config) -> None:
    """Whole models have no adapter: what is said about one would be ignored."""
    if config.train.parameters != "full":
        return
    default = LoraConfig()
    said = {f"lora.{name}": getattr(config.lora, name) for name in LoraConfig.__struct_fields__
            if getattr(config.lora, name) != getattr(default, name)}  # fmt: skip
    for agent, own in config.agents.items():
        said |= {
            f"agents.{agent}.{name}": value for name in ("rank", "alpha", "targets") if (value := getattr(own, name))
        }
    for key, value in said.items():
        raise ConfigError(
            f"{key}={list(value) if isinstance(value, tuple) else value} has no meaning with train.parameters=full, where agents "
            "have no adapter: leave it out, or set train.parameters=lora"
        )


def check_full_size(config: Config, num_parameters: int) -> None:
    """Raise `ConfigError` for a model too large to be had whole by every agent and every version."""
    if num_parameters > MAX_FULL_PARAMETERS:
        raise ConfigError(
            f"train.parameters=full: model {config.model} has {num_parameters / 1e6:,.0f} million parameters, and every agent and "
            f"every version is a copy of it, so at most {MAX_FULL_PARAMETERS / 1e6:.0f} million are allowed: use train.parameters=lora"
        )


def _check_optimizer(config: Config) -> None:
    train = config.train
    for beta in train.betas:
        if not (math.isfinite(beta) and 0.0 <= beta < 1.0):
            raise ConfigError(f"train.betas={list(train.betas)}: each must be at least 0 and below 1")
    if train.schedule == "constant":
        for key, value in (("decay_steps", train.decay_steps), ("final_lr_share", train.final_lr_share)):
            if value:
                raise ConfigError(
                    f"train.{key}={value} has no meaning with train.schedule=constant, where the learning rate does not "
                    "fall: leave it out, or set train.schedule=linear or cosine"
                )
        return
    key, end = ("steps", train.steps) if train.decay_steps is None else ("decay_steps", train.decay_steps)
    if 0 < end <= train.warmup_steps:
        raise ConfigError(
            f"train.{key}={end} is not above train.warmup_steps={train.warmup_steps}: the learning rate would "
            "have no step to fall in; raise the one or lower the other"
        )


def _check_algorithm(config: Config) -> None:
    """Combinations of the loss menu that say two things at once, or nothing."""
    a = config.algorithm
    if a.anchor == "rollout" and a.correction != "none":
        raise ConfigError(
            f"algorithm.correction={a.correction} with algorithm.anchor=rollout would correct twice: the loss's own ratio is to "
            "the rollout already; set anchor=trainer or correction=none"
        )
    if a.kl and a.kl_in == "loss" and a.kl_estimator == "k1":
        raise ConfigError(
            "algorithm.kl_estimator=k1 in the loss has no gradient on average: use k2, k3 or full, or algorithm.kl_in=reward"
        )
    for name, (low, high) in (("keep_ratio", a.keep_ratio), ("keep_mean_ratio", a.keep_mean_ratio)):
        if not (math.isfinite(high) and 0.0 <= low <= 1.0 <= high):
            raise ConfigError(f"algorithm.{name}={[low, high]}: it must be a range around 1, such as [0.5, 2.0]")
    if config.train.batch % a.group:
        raise ConfigError(
            f"train.batch={config.train.batch} is not a multiple of algorithm.group={a.group}: scenarios would be cut in two"
        )


def _check_buffer(config: Config) -> None:
    batch, buffer = config.train.batch, config.buffer
    if batch > buffer.max_episodes:
        raise ConfigError(
            f"train.batch={batch} is above buffer.max_episodes={buffer.max_episodes}: no step could ever start"
        )
    if buffer.depth == "unbounded" and buffer.max_staleness is None:
        raise ConfigError(
            "buffer.depth=unbounded needs a staleness rule, or episodes of any age would be trained on: set buffer.max_staleness, for example 4"
        )
    lag = version_lag(buffer)
    ahead = (lag + 1) * batch
    if ahead > buffer.max_episodes:
        raise ConfigError(
            f"buffer.max_episodes={buffer.max_episodes} is too few: (version lag {lag} + 1) × train.batch {batch} = {ahead}"
            " episodes can wait at once; raise it, or lower buffer.depth or train.batch"
        )


def _check_modes(config: Config) -> None:
    """Interruption and partial rollouts say what becomes of the same answers: some pairs contradict each other."""
    interrupt, partial = config.sync.interrupt, config.rollout.partial
    why = {
        ("token", "abort_resume"): "token swaps answers under way already; for a fresh cache set sync.cache=recompute",
        ("token", "drain"): "games under way end before a version changes, so no token is left to swap at",
        ("episode", "abort_resume"): "an episode keeps its version, so its answers cannot go on under a new one",
        ("drain", "abort_resume"): "drain waits for answers under way, abort_resume ends them",
    }.get((interrupt, partial))
    if why is not None:
        raise ConfigError(f"sync.interrupt={interrupt} and rollout.partial={partial} contradict each other: {why}")
    if config.sync.cache == "recompute" and interrupt != "token":
        raise ConfigError(f"sync.cache=recompute has a meaning with sync.interrupt=token only, not with {interrupt}")


def _check_rollout(config: Config) -> None:
    rollout, model_len = config.rollout, config.policy.max_model_len
    if rollout.top_p < 1.0 and not rollout.top_k:
        raise ConfigError(
            f"rollout.top_p={rollout.top_p} needs rollout.top_k (at most 64): the tokens that were left to sample from are recorded "
            "and trained on, and without a bound they could be the whole vocabulary"
        )
    if rollout.max_tokens >= model_len:
        raise ConfigError(
            f"rollout.max_tokens={rollout.max_tokens} leaves no room for a prompt in policy.max_model_len={model_len}: lower the one or raise the other"
        )


def _check_jury(config: Config) -> None:
    jury = config.jury
    if jury.agent == "api":
        if not jury.api_base or not jury.api_model:
            raise ConfigError("jury.agent=api needs jury.api_base and jury.api_model")
    elif "@" in jury.agent:
        PolicyVersion.parse(jury.agent)
    elif jury.agent != "base":
        raise ConfigError(f"jury.agent={jury.agent!r}: it must be base, api, or a frozen version such as pro@3")
