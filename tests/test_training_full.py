"""Agents that train every parameter: gradients against plain autograd on a copy of the model, versions, checkpoints, peft."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import replace
from transformers import AutoModelForCausalLM

from selfplay.config import Config
from selfplay.errors import ConfigError, TrainerError
from selfplay.store.adapters import AdapterStore
from selfplay.training import checkpoint
from selfplay.training.export import Exporter, load_version
from selfplay.training.full import find_full_layout
from selfplay.training.service import start_trainer
from selfplay.training.trainer import Trainer
from selfplay.types import PolicyVersion, Segment
from selfplay.wire.messages import Export, Save, Send
from training_site import Ranks, config, plain_loss, rank_config, segments, train_steps, worst_relative

IDS = [72, 101, 108, 108, 111, 32, 119, 111, 114, 108, 100]
Weights = dict[str, torch.Tensor]


def full(**sections: Any) -> Config:
    return config(**sections | {"train": {"parameters": "full"} | sections.get("train", {})})


def trainer_of(model: Path, place: Path, settings: Config, noise: float = 0.05, **changes: Any) -> Trainer:
    """Agents that differ from the base and from each other."""
    trainer, _ = start_trainer(rank_config(model, place, settings, **changes))
    for i, agent in enumerate(trainer.policy.adapters.values()):
        move(agent.flat, noise, seed=i)
    return trainer


@torch.no_grad()
def move(flat: torch.Tensor, noise: float, *, seed: int) -> None:
    flat.add_(torch.randn(flat.shape, generator=torch.Generator().manual_seed(seed)), alpha=noise)


def copy_of(model: Path, tensors: Mapping[str, torch.Tensor]) -> Any:
    """The model with other weights, as plain transformers have it."""
    plain: Any = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32, attn_implementation="eager")
    weights = {n.removeprefix("base_model.model."): t.clone() for n, t in tensors.items()}
    plain.load_state_dict(weights)
    return plain


def plain_gradients(model: Any, reference: Any, settings: Config, chosen: list[Segment], normaliser: float) -> Weights:
    """Gradient of the loss as the formulas say it: full logits, one sequence at a time, nothing of ours."""
    for s in chosen:
        ids = torch.tensor([s.ids])
        logs = torch.log_softmax(model(input_ids=ids, use_cache=False).logits[0, :-1], -1)
        with torch.no_grad():
            theirs = torch.log_softmax(reference(input_ids=ids, use_cache=False).logits[0, :-1], -1)
        at = torch.tensor([t - 1 for t, m in enumerate(s.mask) if m])
        sampled = torch.tensor([x for x, m in zip(s.logprobs, s.mask, strict=True) if m])
        advantages = torch.tensor([x for x, m in zip(s.advantages, s.mask, strict=True) if m])
        loss = plain_loss(settings.algorithm, logs[at], theirs[at], ids[0, at + 1], sampled, advantages)
        (loss / normaliser).backward()
    return {n: p.grad for n, p in model.named_parameters()}


def check(model: Path, place: Path, settings: Config, chosen: list[Segment], max_tokens: int = 64) -> None:
    trainer = trainer_of(model, place, settings)
    moving = settings.algorithm.reference == "moving"
    for i, (agent, own) in enumerate(trainer.policy.adapters.items()):
        if moving:
            trainer.references[agent] = own.flat.detach().clone()
            move(trainer.references[agent], 0.05, seed=10 + i)
    (message,) = train_steps(chosen, step=1, max_tokens=max_tokens)
    trainer.accumulate(message)
    for agent in message.agents:
        own, layout = trainer.policy.adapters[agent], trainer.policy.adapters[agent].layout
        past = dict(zip(layout.names, own.split(trainer.references[agent]), strict=True)) if moving else None
        reference: Any = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
        if past is not None:
            reference.load_state_dict({n.removeprefix("base_model.model."): t for n, t in past.items()})
        mine = [s for s in chosen if s.agent == agent]
        expected = plain_gradients(
            copy_of(model, own.tensors()), reference, settings, mine, sum(s.num_actions for s in mine)
        )
        assert own.flat.grad is not None
        found = dict(zip(expected, own.split(own.flat.grad), strict=True))
        assert [f"base_model.model.{n}" for n in expected] == list(layout.names)
        assert worst_relative(found, expected) <= 1e-5


@pytest.mark.parametrize(
    ("algorithm", "agents"),
    [
        ({}, ("pro",)),
        ({"kl": 0.5, "entropy": 0.3, "loss": "ppo"}, ("con", "pro")),
        ({"kl": 0.5, "reference": "moving"}, ("con", "pro")),
    ],
    ids=["one agent", "two agents, the base as reference", "two agents, moving references"],
)
def test_gradients_are_those_of_a_copy_of_the_model(
    tiny_model: Path, tmp_path: Path, algorithm: dict[str, Any], agents: tuple[str, ...]
) -> None:
    check(tiny_model, tmp_path, full(algorithm=algorithm), segments(2, agents))


def test_a_head_that_is_the_embedding_gets_both_gradients(tied_model: Path, tmp_path: Path) -> None:
    check(tied_model, tmp_path, full(train={"activation_checkpointing": True}, algorithm={"kl": 0.2}), segments(3))


def test_version_0_is_the_base(tiny_model: Path, tmp_path: Path) -> None:
    trainer = trainer_of(tiny_model, tmp_path, full(), noise=0.0)
    plain = copy_of(tiny_model, trainer.policy.adapters["pro"].tensors())
    for name, weight in AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32).named_parameters():
        assert torch.equal(weight, plain.get_parameter(name))
    with torch.no_grad():
        logs = torch.log_softmax(plain(torch.tensor([IDS])).logits[0, :-1], -1)
    expected = logs[torch.arange(len(IDS) - 1), torch.tensor(IDS[1:])].tolist()
    assert trainer.policy.probe("pro", IDS) == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("which", ["tiny_model", "tied_model"])
def test_a_version_is_a_peft_adapter_and_comes_back(which: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    from peft import PeftModel

    model, version = request.getfixturevalue(which), PolicyVersion("pro", 1)
    trainer = trainer_of(model, tmp_path, full())
    exporter = Exporter(trainer.policy, "float32")
    where = {"folder": str(tmp_path / "adapters"), "transport": "file", "address": str(tmp_path / "bucket")}
    exporter.export(Export(request=1, version=version, **where))  # type: ignore[arg-type]
    sent, store = exporter.send(Send(request=2, version=version, timeout_s=60.0)), AdapterStore(tmp_path / "adapters")
    exporter.close()
    assert store.verify(version).digest == sent.digest
    base: Any = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32, attn_implementation="eager")
    with torch.no_grad():
        bare = base(torch.tensor([IDS])).logits
        expected = copy_of(model, trainer.policy.adapters["pro"].tensors())(torch.tensor([IDS])).logits
        policy: Any = PeftModel.from_pretrained(base, str(store.path(version)))
        assert torch.equal(policy(torch.tensor([IDS])).logits, expected)
        with policy.disable_adapter():
            assert torch.equal(policy(torch.tensor([IDS])).logits, bare)
    again = trainer_of(model, tmp_path, full(), noise=0.0)
    assert load_version(again.policy, store, version)
    assert torch.equal(again.policy.adapters["pro"].flat, trainer.policy.adapters["pro"].flat)


def test_three_and_three_steps_are_six(tiny_model: Path, tmp_path: Path) -> None:
    settings = full(algorithm={"kl": 0.3, "reference": "moving", "reference_every": 2, "epochs": 2, "loss": "ppo"})

    def run(trainer: Trainer, steps: range) -> list[torch.Tensor]:
        for step in steps:
            trainer.step(train_steps(segments(step, each=2), step=step)[0])
        return [t for o in trainer.optimizers.values() for t in (o.flat, *o.state()[:2])] + [
            *trainer.references.values()
        ]

    straight, first = (trainer_of(tiny_model, tmp_path, settings, noise=0.0) for _ in range(2))
    expected = run(straight, range(6))
    run(first, range(3))
    checkpoint.save(first, tmp_path / "3")
    second, _ = start_trainer(rank_config(tiny_model, tmp_path, settings, checkpoint=str(tmp_path / "3")))
    assert all(torch.equal(a, b) for a, b in zip(run(second, range(3, 6)), expected, strict=True))
    with pytest.raises(
        TrainerError, match=r"lora_rank \{'con': 0, 'pro': 0\}.*: lora.rank or train.parameters changed"
    ):
        start_trainer(rank_config(tiny_model, tmp_path, config(), checkpoint=str(tmp_path / "3")))


def test_a_module_that_is_not_computed_token_by_token_is_named() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.LSTM(2, 2))
    with pytest.raises(
        ConfigError, match=r"^train\.parameters=full: 1 is a LSTM; only embeddings, linear layers and norms"
    ):
        find_full_layout(model)


@pytest.mark.engine
def test_two_ranks_that_share_the_base_are_one_trainer(tiny_model: Path, tmp_path: Path) -> None:
    """Step 1 is of one agent, so that one rank of two has none of its segments; in all others both have both."""

    def batch(step: int) -> list[Segment]:
        return segments(step, ("pro",), each=1) if step == 1 else segments(step)

    settings = full(algorithm={"kl": 0.2, "epochs": 2, "loss": "ppo"})
    alone = trainer_of(tiny_model, tmp_path, settings, noise=0.0)
    start = alone.optimizers["pro"].flat.detach().clone()
    sharing = replace(settings, train=replace(settings.train, shard="base"))
    with Ranks(tiny_model, tmp_path, sharing, world_size=2) as ranks:
        for step in range(3):
            alone.step(train_steps(batch(step), step=step)[0])
            ranks.ask_all(train_steps(batch(step), step=step, ranks=2, request=step))
        ranks.everyone(Save(request=9, folder=str(tmp_path / "2")))
        assert ranks.stop() == [0, 0]
    pair, _ = start_trainer(rank_config(tiny_model, tmp_path, settings, checkpoint=str(tmp_path / "2")))
    for agent, optimizer in pair.optimizers.items():
        moved = alone.optimizers[agent].flat - start
        assert float(((optimizer.flat - start - moved).norm() / moved.norm()).detach()) <= 1e-4, agent
