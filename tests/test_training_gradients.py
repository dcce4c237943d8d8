"""The gradient of a packed row against peft with full logits and plain autograd, one sequence at a time."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import replace

from selfplay.config import Config, agent_lora
from selfplay.errors import TrainerError
from selfplay.scoring.packing import num_distinct_tokens
from selfplay.training.rows import pack_row, teacher_forced
from selfplay.training.service import start_trainer
from selfplay.training.trainer import Trainer
from selfplay.types import Segment
from training_site import config, peft_gradients, rank_config, segment, segments, train_steps, worst_relative

TOLERANCE = 1e-5


def trainer_of(model: Path, place: Path, settings: Config, **changes: Any) -> Trainer:
    """A trainer whose B matrices are not zero, so that A has a gradient, too."""
    trainer, _ = start_trainer(rank_config(model, place, settings, **changes))
    for i, adapter in enumerate(trainer.policy.adapters.values()):
        generator = torch.Generator().manual_seed(i)
        with torch.no_grad():
            adapter.flat.add_(torch.randn(adapter.flat.shape, generator=generator), alpha=0.05)
    return trainer


def gradients(trainer: Trainer, chosen: list[Segment], max_tokens: int) -> dict[str, dict[str, torch.Tensor]]:
    (message,) = train_steps(chosen, step=1, max_tokens=max_tokens)
    trainer.accumulate(message)
    out = {}
    for agent in message.agents:
        adapter = trainer.policy.adapters[agent]
        assert adapter.flat.grad is not None
        parts = torch.split(adapter.flat.grad, list(adapter.layout.sizes))
        shaped = [p.view(s) for p, s in zip(parts, adapter.layout.shapes, strict=True)]
        out[agent] = dict(zip(adapter.layout.names, shaped, strict=True))
    return out


def check(model: Path, place: Path, settings: Config, chosen: list[Segment], max_tokens: int, **changes: Any) -> None:
    trainer = trainer_of(model, place, settings, **changes)
    found = gradients(trainer, chosen, max_tokens)
    for agent, ours in found.items():
        own = [s for s in chosen if s.agent == agent]
        tensors = {n: t.clone() for n, t in trainer.policy.adapters[agent].tensors().items()}
        normaliser = len(own) if settings.algorithm.length != "token" else sum(s.num_actions for s in own)
        theirs = peft_gradients(model, settings, tensors, own, normaliser)
        assert worst_relative(ours, theirs) <= TOLERANCE


@pytest.mark.parametrize("max_tokens", [10_000, 64, 1], ids=["one row", "several rows", "a row each"])
def test_several_agents_in_packed_rows(tiny_model: Path, tmp_path: Path, max_tokens: int) -> None:
    check(tiny_model, tmp_path, config(), segments(1), max_tokens)


def test_one_agent(tiny_model: Path, tmp_path: Path) -> None:
    check(tiny_model, tmp_path, config(), segments(2, ("pro",)), 10_000)


def test_temperature_scales_the_trained_distribution(tiny_model: Path, tmp_path: Path) -> None:
    check(tiny_model, tmp_path, config(rollout={"temperature": 0.6}), segments(3), 10_000)


def test_recomputed_activations_change_nothing(tiny_model: Path, tmp_path: Path) -> None:
    check(tiny_model, tmp_path, config(train={"activation_checkpointing": True}), segments(4), 64)


ALGORITHMS: list[dict[str, Any]] = [
    {"correction": "none"},
    {"correction": "importance", "tis_cap": 1.1},
    {"correction": "token_tis", "tis_cap": 1.1},
    {"correction": "sequence_tis", "tis_cap": 1.1},
    {"correction": "icepop", "keep_ratio": [0.7, 1.4]},
    {"correction": "geometric", "keep_mean_ratio": [0.5, 2.0]},
    {"loss": "ppo", "anchor": "rollout", "correction": "none"},
    {"loss": "gspo", "anchor": "rollout", "correction": "none", "length": "sequence"},
    {"loss": "cispo", "anchor": "rollout", "correction": "none"},
    {"loss": "dppo_tv", "anchor": "rollout", "correction": "none", "tv_bound": 0.001},
    {"loss": "ppo", "correction": "icepop", "length": "constant", "length_constant": 16.0},
    {"kl": 0.5, "kl_estimator": "full", "length": "sequence"},
    {"kl": 0.5, "kl_estimator": "k2"},
    {"kl": 0.5, "kl_estimator": "k3"},
    {"kl": 0.5, "kl_estimator": "k1", "kl_in": "reward"},
    {"entropy": 0.3, "kl": 0.1},
]


@pytest.mark.parametrize("algorithm", ALGORITHMS, ids=lambda a: "-".join(f"{v}" for v in a.values()))
def test_each_algorithm_has_the_gradient_of_its_formula(
    tiny_model: Path, tmp_path: Path, algorithm: dict[str, Any]
) -> None:
    """Off policy and with a shared beginning: the recorded log-probabilities are noise around the trainer's."""
    check(tiny_model, tmp_path, config(algorithm=algorithm), sharing(8), 64)


def sharing(seed: int) -> list[Segment]:
    """Segments of two agents of which some begin alike, one is another's beginning, and one comes twice."""
    first, second = segment("pro", seed), segment("pro", seed + 1)
    forked = replace(second, ids=(*first.ids[:6], *second.ids[6:]))
    cut = max(t for t, m in enumerate(first.mask[:-1]) if m) + 1
    start = replace(
        first,
        ids=first.ids[:cut],
        mask=first.mask[:cut],
        logprobs=first.logprobs[:cut],
        advantages=first.advantages[:cut],
    )
    again = replace(first, advantages=tuple(-2 * a for a in first.advantages))
    return [first, forked, segment("con", seed + 2), start, again, replace(first, agent="con")]


@pytest.mark.parametrize("max_tokens", [10_000, 40, 1], ids=["one row", "several rows", "a row each"])
def test_shared_beginnings_are_computed_once_with_the_same_gradient(
    tiny_model: Path, tmp_path: Path, max_tokens: int
) -> None:
    check(tiny_model, tmp_path, config(), sharing(20), max_tokens)


def test_a_row_has_each_distinct_prefix_once() -> None:
    chosen = sharing(20)
    row = pack_row(chosen, torch.device("cpu"))
    prefixes = {(s.agent, s.ids[:n]) for s in chosen for n in range(1, len(s.ids) + 1)}
    assert row.num_tokens == num_distinct_tokens(chosen) == len(prefixes)
    assert len(row.picks) == sum(s.num_actions for s in chosen)
    assert len(row.targets) < len(row.picks)
    ordered = sorted(chosen, key=lambda s: (s.agent, s.ids))
    assert row.targets[row.picks].tolist() == [i for s in ordered for i, m in zip(s.ids, s.mask, strict=True) if m]


def test_epochs_go_on_from_where_the_step_began(tiny_model: Path, tmp_path: Path) -> None:
    """Two epochs of ppo are two updates; the second is clipped around the first one's start, as a plain loop would."""
    settings = config(algorithm={"loss": "ppo", "epochs": 2, "correction": "none"}, train={"lr": 0.03})
    two, one = (
        trainer_of(tiny_model, tmp_path, s)
        for s in (settings, config(algorithm={"correction": "none"}, train={"lr": 0.03}))
    )
    (message,) = train_steps(segments(9), step=1)
    reports = two.step(message)
    one.step(message)
    assert {a: (o.num_steps, o.num_updates) for a, o in two.optimizers.items()} == {"con": (1, 2), "pro": (1, 2)}
    assert all(0 < r.clip_fraction < 1 and r.moved for r in reports.values())
    for agent, optimizer in two.optimizers.items():
        assert not torch.equal(optimizer.flat, one.optimizers[agent].flat)


def test_fewer_targets_and_another_rank(tiny_model: Path, tmp_path: Path) -> None:
    settings = config(lora={"rank": 3, "alpha": 4.5, "targets": ["q_proj", "down_proj"]})
    check(tiny_model, tmp_path, settings, segments(5), 10_000)


def test_the_last_layer_only(tiny_model: Path, tmp_path: Path) -> None:
    check(tiny_model, tmp_path, config(lora={"layers": 1}), segments(5), 64)


def test_what_lies_below_all_adapters_is_computed_once_a_step(tiny_model: Path, tmp_path: Path) -> None:
    """Three epochs and a moving reference are four passes over one row; each finds what a pass without help would."""
    settings = config(lora={"layers": 1}, algorithm={"loss": "ppo", "epochs": 3, "kl": 0.5, "reference": "moving"})
    trainer = trainer_of(tiny_model, tmp_path, settings)
    passes = [0, 0]
    for i, layer in enumerate(trainer.policy.layers):

        def count(*_: Any, i: int = i) -> None:
            passes[i] += 1

        layer.mlp.register_forward_hook(count)
    (message,) = train_steps(segments(9), step=1, max_tokens=10_000)
    trainer.step(message)
    assert passes == [1, 4]
    row = pack_row(message.micro_batches[0], trainer.policy.device)
    first = trainer.policy(row)
    again = trainer.policy(row, trunk=first.trunk)
    assert torch.equal(first.head.logprobs, again.head.logprobs)
    assert passes == [2, 6]


def test_agents_with_ranks_scales_and_targets_of_their_own(tiny_model: Path, tmp_path: Path) -> None:
    """One row of two agents that share no projection but one; each has the gradient of peft with its own settings."""
    own = {
        "pro": {"rank": 3, "targets": ["q_proj", "down_proj"]},
        "con": {"alpha": 5.0, "targets": ["q_proj", "up_proj"]},
    }
    settings = config(lora={"rslora": True}, agents=own)
    trainer = trainer_of(tiny_model, tmp_path, settings)
    chosen = segments(6)
    found = gradients(trainer, chosen, 10_000)
    for agent, ours in found.items():
        mine = [s for s in chosen if s.agent == agent]
        alone = replace(settings, lora=agent_lora(settings, agent))
        tensors = {n: t.clone() for n, t in trainer.policy.adapters[agent].tensors().items()}
        theirs = peft_gradients(tiny_model, alone, tensors, mine, sum(s.num_actions for s in mine))
        assert worst_relative(ours, theirs) <= TOLERANCE
    layouts = {a: adapter.layout.adapter_config() for a, adapter in trainer.policy.adapters.items()}
    assert layouts["pro"] == {"r": 3, "lora_alpha": 16, "target_modules": ["down_proj", "q_proj"], "use_rslora": True}
    assert (layouts["con"]["r"], layouts["con"]["lora_alpha"]) == (8, 5)


def test_a_segment_as_long_as_the_row(tiny_model: Path, tmp_path: Path) -> None:
    one = segment("pro", 6)
    check(tiny_model, tmp_path, config(), [one, segment("con", 7)], len(one.ids))


def test_opponent_tokens_are_context_only_and_the_stop_token_is_trained(tiny_model: Path, tmp_path: Path) -> None:
    """Advantages outside the mask, however large, do not count; the last sampled token does."""
    trainer = trainer_of(tiny_model, tmp_path, config())
    plain = Segment(
        episode_id="1.0", agent="pro", seat="pro", ids=(1, 2, 3, 4, 5, 257), mask=(0, 0, 1, 0, 1, 1), versions=(0, 0),
        logprobs=(0, 0, -5.0, 0, -5.0, -5.0), advantages=(0, 0, 1.0, 0, 1.0, 1.0),
    )  # fmt: skip

    def flat_gradient(s: Segment) -> torch.Tensor:
        trainer.optimizers["pro"].forget_grad()
        trainer.accumulate(train_steps([s], step=1)[0])
        grad = trainer.policy.adapters["pro"].flat.grad
        assert grad is not None
        return grad.clone()

    expected = flat_gradient(plain)
    assert torch.equal(expected, flat_gradient(replace(plain, advantages=(9.0, 9.0, 1.0, 9.0, 1.0, 1.0))))
    assert not torch.allclose(expected, flat_gradient(replace(plain, ids=(1, 2, 3, 99, 5, 257))))
    assert not torch.allclose(expected, flat_gradient(replace(plain, advantages=(0, 0, 1.0, 0, 1.0, 0.0))))


def test_segments_of_one_row_do_not_see_each_other(tiny_model: Path, tmp_path: Path) -> None:
    trainer = trainer_of(tiny_model, tmp_path, config())
    ids = [5, 6, 7, 8, 9]
    alone = trainer.policy.probe("pro", ids)
    with torch.no_grad():
        row = pack_row([teacher_forced("con", [1, 2, 3]), teacher_forced("pro", ids)], torch.device("cpu"))
        packed = trainer.policy(row).head.logprobs[row.picks]
    assert packed[2:].tolist() == pytest.approx(alone, abs=1e-5)


def test_a_model_that_caps_its_logits_is_refused(tmp_path: Path) -> None:
    """Computed as if it did not, it would be trained on the wrong distribution without a sign."""
    from transformers import Gemma2Config, Gemma2ForCausalLM

    torch.manual_seed(0)
    small = Gemma2Config(
        vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=16, final_logit_softcapping=0.5, attn_logit_softcapping=None, sliding_window=8,
        layer_types=["sliding_attention", "full_attention"], pad_token_id=0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    model = Gemma2ForCausalLM(small)
    with torch.no_grad():
        model.get_output_embeddings().weight.mul_(50)
    model.save_pretrained(tmp_path / "gemma")
    with pytest.raises(TrainerError, match="scale or cap its logits"):
        start_trainer(rank_config(tmp_path / "gemma", tmp_path, config()))


def test_the_last_layer_computes_what_is_looked_at(tiny_model: Path, tmp_path: Path) -> None:
    """Of a long prompt and a short answer the last MLP sees as many tokens as there are actions; the others' outputs are 0."""
    trainer = trainer_of(tiny_model, tmp_path, config())
    seen: list[tuple[int, int]] = []
    mlp: torch.nn.Module = trainer.policy.layers[-1].get_submodule("mlp")
    mlp.register_forward_hook(lambda _m, x, y: seen.append((x[0].shape[1], int((y[0] != 0).any(-1).sum()))))
    chosen = segments(1, ("pro",))
    row = pack_row(chosen, trainer.policy.device)
    trainer.policy(row)
    assert len(row.wanted) < row.num_tokens
    assert seen == [(row.num_tokens, len(row.wanted))]
    assert row.wanted.tolist() == sorted(set(row.predicted_from.tolist()))
