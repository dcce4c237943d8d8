"""Flat adapters, the segment-wise linear and the frozen head, each against the plain way of computing it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from training_site import config, rank_config

from selfplay.config.schema import LoraConfig
from selfplay.errors import ConfigError, TrainerError
from selfplay.training import head, rank
from selfplay.training.head import frozen_head_logprobs
from selfplay.training.lora import FlatAdapter, LoraLayout, Projection, find_layout
from selfplay.training.segment_lora import SegmentLora
from selfplay.training.service import start_trainer
from selfplay.training.sharding import Setting, shards_base

LAYOUT = LoraLayout(
    rank=2,
    alpha=5.0,
    projections=(
        Projection(name="model.layers.0.self_attn.q_proj", in_features=6, out_features=4),
        Projection(name="model.layers.0.mlp.up_proj", in_features=6, out_features=8),
    ),
)


def test_two_agents_start_apart_and_one_agent_always_alike() -> None:
    pro, con = (FlatAdapter.create(LAYOUT, seed=1, agent=a).flat for a in ("pro", "con"))
    assert torch.equal(pro, FlatAdapter.create(LAYOUT, seed=1, agent="pro").flat)
    assert not torch.equal(pro, con)
    assert not torch.equal(pro, FlatAdapter.create(LAYOUT, seed=2, agent="pro").flat)


def test_a_fresh_adapter_changes_nothing_and_can_learn() -> None:
    tensors = FlatAdapter.create(LAYOUT, seed=1, agent="pro").tensors()
    for name, tensor in tensors.items():
        assert tensor.dtype == torch.float32
        assert bool((tensor == 0).all()) == name.endswith("lora_B.weight")
    assert float(tensors["base_model.model.model.layers.0.mlp.up_proj.lora_A.weight"].abs().max()) <= 6**-0.5


def test_matrices_are_views_with_peft_names_and_shapes() -> None:
    adapter = FlatAdapter.create(LAYOUT, seed=1, agent="pro")
    shapes = {name: tuple(t.shape) for name, t in adapter.tensors().items()}
    assert shapes == {
        "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight": (2, 6),
        "base_model.model.model.layers.0.self_attn.q_proj.lora_B.weight": (4, 2),
        "base_model.model.model.layers.0.mlp.up_proj.lora_A.weight": (2, 6),
        "base_model.model.model.layers.0.mlp.up_proj.lora_B.weight": (8, 2),
    }
    sum(m.sum() * (i + 1) for i, m in enumerate(adapter.matrices())).backward()  # type: ignore[union-attr]
    assert adapter.flat.grad is not None
    assert [float(g[0]) for g in torch.split(adapter.flat.grad, list(LAYOUT.sizes))] == [1, 2, 3, 4]


def test_tensors_come_back_bit_for_bit() -> None:
    source, target = FlatAdapter.create(LAYOUT, seed=1, agent="a"), FlatAdapter.create(LAYOUT, seed=2, agent="b")
    with torch.no_grad():
        source.flat.normal_(generator=torch.Generator().manual_seed(0))
    target.load({n: t.clone() for n, t in reversed(source.tensors().items())})
    assert torch.equal(source.flat, target.flat)


def test_foreign_tensors_are_refused_by_name() -> None:
    adapter = FlatAdapter.create(LAYOUT, seed=1, agent="pro")
    tensors = {n: t.clone() for n, t in adapter.tensors().items()}
    name, *_ = tensors
    with pytest.raises(TrainerError, match=r"lora\.rank=2 needs \(2, 6\)"):
        adapter.load(tensors | {name: torch.zeros(4, 6)})
    with pytest.raises(TrainerError, match="other"):
        adapter.load(tensors | {"a.other": torch.zeros(1)})
    del tensors[name]
    with pytest.raises(TrainerError, match="q_proj"):
        adapter.load(tensors)


def test_adapter_config_is_what_peft_writes() -> None:
    assert LAYOUT.adapter_config() == {"r": 2, "lora_alpha": 5, "target_modules": ["q_proj", "up_proj"]}
    assert isinstance(LAYOUT.adapter_config()["lora_alpha"], int)


def test_a_target_that_does_not_exist_names_those_that_do() -> None:
    model = nn.ModuleDict({"q_proj": nn.Linear(2, 2), "norm": nn.LayerNorm(2)})
    with pytest.raises(ConfigError, match=r"no projection 'qq_proj'; it has q_proj"):
        find_layout(model, LoraConfig(targets=("qq_proj",)))
    with pytest.raises(ConfigError, match=r"LayerNorm, only nn\.Linear"):
        find_layout(model, LoraConfig(targets=("norm",)))


@pytest.mark.parametrize("agents", [("train", "half", "pop")])
def test_agents_may_be_called_like_methods(tiny_model: Path, tmp_path: Path, agents: tuple[str, ...]) -> None:
    trainer, _ = start_trainer(rank_config(tiny_model, tmp_path, config(), agents=agents, versions={}))
    assert set(trainer.policy.adapters) == set(agents)
    assert trainer.policy.probe("half", [1, 2, 3]) == trainer.policy.probe("train", [1, 2, 3])


@pytest.mark.parametrize("bounds", [((0, 7),), ((0, 3), (3, 7)), ((0, 3), (3, 3), (3, 7))])
def test_segment_lora_is_the_plain_sum_of_both_paths(bounds: tuple[tuple[int, int], ...]) -> None:
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float32).requires_grad_()

    x, weight, bias = random(1, 7, 6), random(4, 6).detach(), random(4).detach()
    matrices = [m for _ in bounds for m in (random(2, 6), random(4, 2))]
    ours = SegmentLora.apply(x, weight, bias, 2.5, bounds, *matrices)
    plain = torch.cat(
        [
            F.linear(x[:, s:e], weight, bias) + 2.5 * (x[:, s:e] @ a.t() @ b.t())
            for (s, e), a, b in zip(bounds, matrices[::2], matrices[1::2], strict=True)
        ],
        dim=1,
    )
    torch.testing.assert_close(ours, plain)
    upstream = torch.randn(plain.shape, generator=generator)
    for got, wanted in zip(
        torch.autograd.grad(ours, (x, *matrices), upstream),
        torch.autograd.grad(plain, (x, *matrices), upstream),
        strict=True,
    ):
        torch.testing.assert_close(got, wanted)


@pytest.mark.parametrize("inv_temperature", [1.0, 1.7])
@pytest.mark.parametrize("rows_at_once", [1, 3, 100])
def test_the_frozen_head_is_log_softmax(
    monkeypatch: pytest.MonkeyPatch, inv_temperature: float, rows_at_once: int
) -> None:
    vocab, num = 11, 7
    monkeypatch.setitem(head.CHUNK_BYTES, "cpu", rows_at_once * 4 * vocab)
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(num, 5, generator=generator).requires_grad_()
    weight, targets = torch.randn(vocab, 5, generator=generator), torch.arange(num) % vocab
    logprobs, entropies = frozen_head_logprobs(hidden, weight, targets, inv_temperature=inv_temperature)
    logs = torch.log_softmax(hidden @ weight.t() * inv_temperature, -1)
    plain = logs[torch.arange(num), targets]
    torch.testing.assert_close(logprobs, plain)
    torch.testing.assert_close(entropies, -(logs.exp() * logs).sum(-1).detach())
    assert not entropies.requires_grad
    upstream = torch.randn(num, generator=generator)
    (got,), (wanted,) = (torch.autograd.grad(y, hidden, upstream) for y in (logprobs, plain))
    torch.testing.assert_close(got, wanted)


def test_no_actions_give_no_logprobs_and_a_zero_gradient() -> None:
    hidden = torch.randn(0, 5).requires_grad_()
    logprobs, entropies = frozen_head_logprobs(hidden, torch.randn(11, 5), torch.empty(0, dtype=torch.long))
    logprobs.sum().backward()
    assert logprobs.shape == entropies.shape == (0,)
    assert hidden.grad is not None


@pytest.mark.parametrize(
    ("setting", "device", "world_size", "sharded"),
    [
        ("auto", "cpu", 2, False), ("auto", "cuda", 1, False), ("auto", "cuda", 2, True), ("none", "cuda", 2, False),
        ("base", "cpu", 1, True),
    ],
)  # fmt: skip
def test_auto_shards_the_base_on_several_gpus_only(
    setting: Setting, device: str, world_size: int, sharded: bool
) -> None:
    assert shards_base(setting, device=torch.device(device), world_size=world_size) is sharded


def test_a_rank_without_its_config_says_how_it_is_started(capsys: pytest.CaptureFixture[str]) -> None:
    assert rank.main(["rank"]) == rank.main(["rank", "{}"]) == 2
    assert "python -m selfplay.training.rank" in capsys.readouterr().err
