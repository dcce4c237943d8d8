"""Combinations of settings that can never run are refused in one line before any model is loaded."""

from __future__ import annotations

import pytest

from selfplay.config import (
    agent_lora,
    check_config,
    engine_rank,
    engine_targets,
    live_adapter_slots,
    load_config,
    resolve_transport,
)
from selfplay.config.derive import awaited_lag, check_adapter_slots, check_full_size, version_lag
from selfplay.errors import ConfigError


def test_the_defaults_can_run() -> None:
    check_config(load_config(None, ["env=debate-v0"]))


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["env="], "env is empty"),
        (["env=  "], "env is empty"),
        (["model="], "model is empty"),
        (["lora.rank=12", "policy.max_rank=8"], r"lora.rank=12 is above policy.max_rank=8"),
        (["lora.targets=[]"], "lora.targets is empty"),
        (['lora.targets=["q_porj"]'], "unknown projection 'q_porj'; did you mean 'q_proj'"),
        (['lora.targets=["lm_head"]'], "unknown projection 'lm_head'"),
        (['lora.targets=["q_proj", "q_proj"]'], "twice"),
        (["train.betas=[0.9, 1.0]"], "train.betas"),
        (["train.betas=[-0.1, 0.9]"], "train.betas"),
        (["train.decay_steps=9"], "train.decay_steps=9 has no meaning with train.schedule=constant"),
        (["train.final_lr_share=0.5"], "train.final_lr_share=0.5 has no meaning with train.schedule=constant"),
        (
            ["train.schedule=cosine", "train.warmup_steps=10", "train.steps=5"],
            "train.steps=5 is not above train.warmup_steps=10",
        ),
        (
            ["train.schedule=linear", "train.warmup_steps=9", "train.decay_steps=9"],
            "train.decay_steps=9 is not above train.warmup_steps=9",
        ),
        (["train.batch=9", "buffer.max_episodes=8"], r"train.batch=9 is above buffer.max_episodes=8"),
        (
            ["train.batch=8", "buffer.depth=3", "buffer.max_episodes=31"],
            r"\(version lag 3 \+ 1\) × train.batch 8 = 32",
        ),
        (["rollout.max_tokens=2048"], "leaves no room for a prompt"),
        (["buffer.depth=unbounded"], "needs a staleness rule, .* set buffer.max_staleness"),
        (["sync.interrupt=token", "rollout.partial=abort_resume"], "contradict each other: token swaps"),
        (["sync.interrupt=token", "rollout.partial=drain"], "contradict each other: games under way end"),
        (["sync.interrupt=episode", "rollout.partial=abort_resume"], "contradict each other: an episode keeps"),
        (["sync.interrupt=drain", "rollout.partial=abort_resume"], "contradict each other: drain waits"),
        (["sync.cache=recompute"], "has a meaning with sync.interrupt=token only, not with turn"),
        (["train.parameters=full", "lora.rank=4"], "lora.rank=4 has no meaning with train.parameters=full"),
        (["train.parameters=full", "lora.rslora=true"], "lora.rslora=True has no meaning .* leave it out, or set"),
        (["train.parameters=full", 'agents.pro.targets=["q_proj"]'], r"agents.pro.targets=\['q_proj'\] has no meaning"),
        (["jury.agent=api"], "needs jury.api_base and jury.api_model"),
        (["jury.agent=pro"], "must be base, api, or a frozen version"),
        (["jury.agent=pro@x"], "not a policy version"),
        (["agents.CON.lr=1"], "agent name 'CON' is not allowed"),
    ],
)
def test_what_can_never_run(overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as e:
        check_config(load_config(None, ["env=debate-v0", *overrides]))
    assert "\n" not in str(e.value)


@pytest.mark.parametrize(
    "overrides",
    [
        ["lora.rank=8", "policy.max_rank=8"],
        ["train.batch=8", "buffer.depth=0", "buffer.max_episodes=8"],
        ["jury.agent=pro@3"],
        ["jury.agent=api", "jury.api_base=local", "jury.api_model=m"],
        ["train.betas=[0.0, 0.0]"],
        ["train.steps=0"],
        ["train.schedule=cosine", "train.warmup_steps=9", "train.decay_steps=10", "train.steps=5"],
    ],
    ids=str,
)
def test_what_just_can(overrides: list[str]) -> None:
    check_config(load_config(None, ["env=debate-v0", *overrides]))


@pytest.mark.parametrize(
    ("asked", "gpu", "used"),
    [("auto", True, "nccl"), ("auto", False, "gloo"), ("shm", True, "shm"), ("file", False, "file")],
)
def test_the_transport(asked: str, gpu: bool, used: str) -> None:
    assert resolve_transport(load_config(None, [f"sync.transport={asked}"]), has_gpu=gpu) == used


def test_nccl_without_a_gpu_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"sync.transport=nccl needs a GPU"):
        resolve_transport(load_config(None, ["sync.transport=nccl"]), has_gpu=False)


@pytest.mark.parametrize(("trained", "depth", "frozen", "slots"), [(2, 1, 0, 6), (2, 0, 1, 5), (1, 4, 2, 8)])
def test_adapter_slots(trained: int, depth: int, frozen: int, slots: int) -> None:
    assert live_adapter_slots(trained, depth, frozen) == slots
    config = load_config(None, [f"buffer.depth={depth}"])
    assert check_adapter_slots(config, num_trained=trained, num_frozen=frozen) == slots


def test_too_few_adapter_slots_are_refused_with_the_arithmetic() -> None:
    config = load_config(None, ["policy.max_live_adapters=5"])
    with pytest.raises(ConfigError, match=r"2 trained agents × \(version lag 1 \+ 2\) \+ 0 frozen = 6"):
        check_adapter_slots(config, num_trained=2, num_frozen=0)
    assert check_adapter_slots(config, num_trained=1, num_frozen=0) == 5


def test_the_engine_is_sized_for_the_rank() -> None:
    assert engine_rank(load_config(None, ["lora.rank=12"])) == 12
    assert engine_rank(load_config(None, ["lora.rank=12", "policy.max_rank=16"])) == 16


@pytest.mark.parametrize(
    ("overrides", "lag", "awaited"),
    [
        (["buffer.depth=0"], 0, 0),
        (["buffer.depth=3"], 3, 3),
        (["buffer.depth=3", "buffer.max_staleness=1"], 1, 1),
        (["buffer.depth=1", "buffer.max_staleness=3"], 1, 1),
        (["buffer.depth=unbounded", "buffer.max_staleness=5"], 5, None),
    ],
)
def test_the_deepest_lag_follows_from_the_settings(overrides: list[str], lag: int, awaited: int | None) -> None:
    config = load_config(None, ["env=kuhn-poker-v0", *overrides])
    check_config(config)
    assert version_lag(config.buffer) == lag
    assert awaited_lag(config.buffer) == awaited


def test_the_engine_is_sized_for_the_largest_agent_and_serves_what_any_of_them_changes() -> None:
    config = load_config(
        None,
        ["agents.pro.rank=32", "lora.targets=['q_proj']", "agents.con.targets=['down_proj']", "agents.con.alpha=4"],
    )
    assert engine_rank(config) == 32
    assert engine_targets(config) == ("q_proj", "down_proj")
    assert (agent_lora(config, "con").alpha, agent_lora(config, "pro").alpha) == (4.0, 16.0)
    assert agent_lora(config, "somebody").rank == 8


def test_the_scale_is_rank_stabilised_by_agent() -> None:
    one = load_config(None, ["agents.pro.rslora=true"])
    assert (agent_lora(one, "pro").rslora, agent_lora(one, "con").rslora) == (True, False)
    others = load_config(None, ["lora.rslora=true", "agents.pro.rslora=false"])
    assert (agent_lora(others, "pro").rslora, agent_lora(others, "con").rslora) == (False, True)


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["algorithm.anchor=rollout"], "would correct twice"),
        (["algorithm.kl=0.1", "algorithm.kl_estimator=k1"], "no gradient on average: use k2, k3 or full"),
        (["algorithm.keep_ratio=[2.0, 5.0]"], r"algorithm.keep_ratio=\[2.0, 5.0\]: it must be a range around 1"),
        (["algorithm.group=3", "train.batch=8"], "not a multiple of algorithm.group=3"),
        (["rollout.top_p=0.9"], "needs rollout.top_k"),
        (["agents.pro.targets=['q_prj']"], "agents.pro.targets: unknown projection 'q_prj'; did you mean 'q_proj'"),
        (["agents.pro.rank=16", "policy.max_rank=8"], "agents.pro.rank=16 is above policy.max_rank=8"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(overrides: list[str], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        check_config(load_config(None, ["env=kuhn-poker-v0", *overrides]))


def test_a_model_that_is_too_large_to_be_had_whole_by_every_version() -> None:
    config = load_config(None, ["env=debate-v0", "model=smollm2-135m", "train.parameters=full"])
    check_full_size(config, 16_000_000)
    with pytest.raises(
        ConfigError, match=r"smollm2-135m has 135 million parameters, .* at most 16 million are allowed"
    ):
        check_full_size(config, 134_515_008)
