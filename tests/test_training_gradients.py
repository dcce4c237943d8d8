"""The gradient of a packed row against peft with full logits and plain autograd, one sequence at a time."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import replace
from training_site import config, peft_gradients, rank_config, segment, segments, train_steps, worst_relative

from selfplay.config import Config
from selfplay.errors import TrainerError
from selfplay.training.rows import pack_row, teacher_forced
from selfplay.training.service import start_trainer
from selfplay.training.trainer import Trainer
from selfplay.types import Segment

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
    trainer.accumulate(message.micro_batches, message.num_actions, message.agents[0])
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
        theirs = peft_gradients(model, settings, tensors, own, sum(s.num_actions for s in own))
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


def test_fewer_targets_and_another_rank(tiny_model: Path, tmp_path: Path) -> None:
    settings = config(lora={"rank": 3, "alpha": 4.5, "targets": ["q_proj", "down_proj"]})
    check(tiny_model, tmp_path, settings, segments(5), 10_000)


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
        trainer.accumulate([[s]], {"pro": 3}, "pro")
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
        packed, _ = trainer.policy(row)
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
