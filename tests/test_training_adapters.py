"""Flat adapters, the segment-wise linear and the frozen head, each against the plain way of computing it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import torch.nn.functional as F
from msgspec.structs import replace
from torch import nn
from transformers import AutoModelForCausalLM

from selfplay.config.schema import LoraConfig
from selfplay.errors import ConfigError, TrainerError
from selfplay.training import head, rank
from selfplay.training.head import frozen_head
from selfplay.training.lora import FlatAdapter, LoraLayout, Projection, find_layout
from selfplay.training.rows import pack_row
from selfplay.training.segment_lora import SegmentLora
from selfplay.training.service import start_trainer
from selfplay.training.sharding import Setting, shards_base
from selfplay.types import Segment
from training_site import config, rank_config, train_steps

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
    sum(m.sum() * (i + 1) for i, m in enumerate(adapter.split(adapter.flat))).backward()  # type: ignore[union-attr]
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


def test_an_adapter_of_the_last_layers_is_named_by_a_pattern_that_peft_reads(tiny_model: Path) -> None:
    base = AutoModelForCausalLM.from_pretrained(tiny_model)
    layout = find_layout(base, LoraConfig(layers=1, targets=("q_proj", "down_proj")))
    assert [p.name for p in layout.projections] == ["model.layers.1.self_attn.q_proj", "model.layers.1.mlp.down_proj"]
    settings = peft.LoraConfig(**layout.adapter_config(), task_type="CAUSAL_LM")
    theirs = peft.get_peft_model(base, settings).state_dict()
    assert {n.replace(".default.", ".") for n in theirs if ".lora_" in n} == set(layout.names)


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
    scaled = tuple((s, e, 2.5 + k) for k, (s, e) in enumerate(bounds))
    ours = SegmentLora.apply(x, weight, bias, scaled, *matrices)
    plain = torch.cat(
        [
            F.linear(x[:, s:e], weight, bias) + scale * (x[:, s:e] @ a.t() @ b.t())
            for (s, e, scale), a, b in zip(scaled, matrices[::2], matrices[1::2], strict=True)
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
    reference = torch.randn(num, 5, generator=generator)
    out = frozen_head(
        hidden, weight, targets, inv_temperature=inv_temperature, reference=reference, entropy_gradient=True
    )
    logs, other = (torch.log_softmax(h @ weight.t() * inv_temperature, -1) for h in (hidden, reference))
    plain = {
        "logprobs": logs[torch.arange(num), targets],
        "entropies": -(logs.exp() * logs).sum(-1),
        "divergences": (logs.exp() * (logs - other)).sum(-1),
    }
    upstream = torch.randn(num, generator=generator)
    for name, wanted in plain.items():
        found = getattr(out, name)
        torch.testing.assert_close(found, wanted)
        (got,), (right,) = (torch.autograd.grad(y, hidden, upstream, retain_graph=True) for y in (found, wanted))
        torch.testing.assert_close(got, right)


def test_a_bfloat16_head_is_computed_in_float32() -> None:
    """A bfloat16 logit of 40 is a multiple of 0.25, and near a certain token its gradient would be rounding."""
    generator = torch.Generator().manual_seed(1)
    weight = torch.randn(11, 32, generator=generator).bfloat16()
    hidden = (2.0 * weight[:4].float() + 0.1 * torch.randn(4, 32, generator=generator)).bfloat16().requires_grad_()
    reference = torch.randn(4, 32, generator=generator).bfloat16()
    targets = torch.tensor([0, 1, 2, 7])
    assert (hidden @ weight.t()).max() > 32
    out = frozen_head(hidden, weight, targets, reference=reference)
    exact = hidden.detach().double().requires_grad_()
    logs, other = (torch.log_softmax(h @ weight.double().t(), -1) for h in (exact, reference.double()))
    chosen = logs[torch.arange(4), targets]
    torch.testing.assert_close(out.logprobs.double(), chosen, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(out.divergences.double(), (logs.exp() * (logs - other)).sum(-1), rtol=1e-5, atol=1e-5)
    (got,), (right,) = torch.autograd.grad(out.logprobs.sum(), hidden), torch.autograd.grad(chosen.sum(), exact)
    assert got.dtype == torch.bfloat16
    torch.testing.assert_close(got.double(), right, rtol=2**-7, atol=1e-4)


def test_a_trained_bfloat16_head_is_computed_in_float32_too() -> None:
    generator = torch.Generator().manual_seed(1)
    weight = torch.randn(11, 32, generator=generator).bfloat16()
    hidden, targets = (2.0 * weight[:4].float()).bfloat16(), torch.tensor([0, 1, 2, 7])
    found = head.trained_head(hidden, weight, targets).logprobs
    exact = torch.log_softmax(hidden.double() @ weight.double().t(), -1)[torch.arange(4), targets]
    torch.testing.assert_close(found.double(), exact, rtol=1e-5, atol=1e-5)


def test_what_was_not_asked_for_carries_no_gradient() -> None:
    hidden = torch.randn(3, 5).requires_grad_()
    out = frozen_head(hidden, torch.randn(11, 5), torch.arange(3))
    assert (out.logprobs.requires_grad, out.entropies.requires_grad, out.divergences.requires_grad) == (
        True,
        False,
        False,
    )
    assert out.divergences.tolist() == [0.0] * 3


def test_no_actions_give_no_logprobs_and_a_zero_gradient() -> None:
    hidden = torch.randn(0, 5).requires_grad_()
    out = frozen_head(hidden, torch.randn(11, 5), torch.empty(0, dtype=torch.long))
    out.logprobs.sum().backward()
    assert out.logprobs.shape == out.entropies.shape == (0,)
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


# ── what was left to sample from ─────────────────────────────────────────────────────────────────


def test_only_what_was_left_to_sample_from_has_probability() -> None:
    """Tokens 1, 4, 5 for the first place, all for the second, one alone for the third; against a masked softmax."""
    generator = torch.Generator().manual_seed(2)
    hidden = torch.randn(3, 5, generator=generator).requires_grad_()
    weight, reference = torch.randn(11, 5, generator=generator), torch.randn(3, 5, generator=generator)
    targets, kept = torch.tensor([4, 9, 2]), torch.tensor([[1, 4, 5], [-1, -1, -1], [2, -1, -1]])
    out = head.frozen_head(hidden, weight, targets, reference=reference, entropy_gradient=True, kept=kept)
    left_out = torch.ones(3, 11, dtype=torch.bool)
    left_out[0, [1, 4, 5]], left_out[1], left_out[2, 2] = False, False, False

    def logs(h: torch.Tensor) -> torch.Tensor:
        return torch.log_softmax((h @ weight.t()).masked_fill(left_out, -torch.inf), -1)

    ours, theirs = logs(hidden), logs(reference)
    p = ours.exp()
    plain = {
        "logprobs": ours[torch.arange(3), targets],
        "entropies": -(p * ours.masked_fill(left_out, 0)).sum(-1),
        "divergences": (p * (ours - theirs).masked_fill(left_out, 0)).sum(-1),
    }
    for name, wanted in plain.items():
        found = getattr(out, name)
        torch.testing.assert_close(found, wanted)
        (got,), (right,) = (torch.autograd.grad(y.sum(), hidden, retain_graph=True) for y in (found, wanted))
        torch.testing.assert_close(got, right)
    assert out.logprobs.tolist()[2] == pytest.approx(0.0, abs=1e-6)
    assert out.entropies.tolist()[2] == pytest.approx(0.0, abs=1e-6)


def test_trainer_and_engine_agree_on_truncated_samples(tiny_model: Path, tmp_path: Path) -> None:
    """Sampled with top-k, top-p and a temperature by the engine; the trainer has the same log-probability of each token."""
    from transformers import AutoModelForCausalLM

    from selfplay.agent import Sampling
    from selfplay.policy.decoding import Batch, Row
    from selfplay.policy.routed_lora import install_routing

    trainer, _ = start_trainer(rank_config(tiny_model, tmp_path, config()))
    served: Any = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32).eval()
    batch = Batch(served, install_routing(served, ()), torch.Generator().manual_seed(0))
    sampling = Sampling(temperature=0.7, top_k=6, top_p=0.8, max_tokens=12)
    rows = [
        Row(request=str(i), ids=[65, 66, 67], sampling=sampling, stop_ids=frozenset(), adapter=None) for i in range(8)
    ]
    batch.join(rows)
    while batch.rows:
        batch.step()
    segments = [
        Segment(
            episode_id=r.request, agent="pro", seat="pro", ids=(*r.ids, *r.sampled), mask=(0, 0, 0, *(1,) * 12),
            logprobs=(0.0, 0.0, 0.0, *r.logprobs), advantages=(0.0,) * 15, versions=(0, 0), kept=tuple(r.kept),
        )
        for r in rows
    ]  # fmt: skip
    row = pack_row(segments, torch.device("cpu"))
    found = trainer.policy(row, 1 / 0.7).head.logprobs[row.picks]
    torch.testing.assert_close(found, row.rollout_logprobs, atol=1e-4, rtol=0)
    assert all(1 <= len(k) <= 6 for r in rows for k in r.kept)
    plain = trainer.policy(pack_row([replace(s, kept=()) for s in segments], torch.device("cpu")), 1 / 0.7)
    assert float((plain.head.logprobs.detach()[row.picks] - row.rollout_logprobs).max()) < -0.05, (
        "the whole vocabulary is another policy"
    )


def test_dropout_is_no_setting_of_an_adapter_and_that_of_a_model_folder_is_never_applied(
    tiny_model: Path, tmp_path: Path
) -> None:
    """The folder asks for it while training; the trainer's log-probabilities are those of the model that was sampled from."""
    with pytest.raises(ConfigError, match=r"lora\.dropout"):
        config(lora={"dropout": 0.1})
    folder = shutil.copytree(tiny_model, tmp_path / "model")
    settings = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(settings | {"attention_dropout": 0.5}))
    plain: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")

    def logs(model: Any) -> list[float]:
        with torch.no_grad():
            logits = model(torch.tensor([ids])).logits[0, :-1]
        return [float(x) for x in torch.log_softmax(logits, -1)[torch.arange(len(ids) - 1), torch.tensor(ids[1:])]]

    ids = list(range(65, 90))
    sampled = logs(plain.eval())
    assert max(abs(a - b) for a, b in zip(sampled, logs(plain.train()), strict=True)) > 1e-3, "it would show"
    trainer, _ = start_trainer(rank_config(folder, tmp_path, config()))
    chosen = Segment(
        episode_id="0.0", agent="pro", seat="pro", ids=tuple(ids), mask=(0, *(1,) * len(sampled)), versions=(0, 0),
        logprobs=(0.0, *sampled), advantages=(0.0, *(1.0,) * len(sampled)),
    )  # fmt: skip
    report = trainer.step(train_steps([chosen], step=1)[0])["pro"]
    assert report.moved
    assert report.max_abs_dlogp < 1e-4, "a ratio of 1 for every token"
