"""Loss, report and optimizer against figures worked out by hand."""

from __future__ import annotations

import math

import pytest
import torch

from selfplay.config.schema import AgentConfig, TrainConfig
from selfplay.errors import TrainerError
from selfplay.training.loss import SUMS, report, tis_loss, token_stats
from selfplay.training.optimizer import AgentOptimizer

LOG = math.log
NOW = [LOG(0.5), LOG(0.2), LOG(0.4)]
SAMPLED = [LOG(0.25), LOG(0.2), LOG(0.1)]
"""Ratios π/μ: 2, 1, 4."""
ADVANTAGES = [1.0, -2.0, 0.5]
CAP = 3.0


def test_loss_weights_each_action_by_its_truncated_ratio() -> None:
    """−(2·1·log ½ + 1·(−2)·log ⅕ + 3·½·log ⅖), and the weights carry no gradient: d/dlog π = −w·A."""
    logprobs = torch.tensor(NOW, requires_grad=True)
    loss = tis_loss(logprobs, torch.tensor(SAMPLED), torch.tensor(ADVANTAGES), cap=CAP)
    loss.backward()
    assert loss.item() == pytest.approx(-(2 * LOG(0.5) - 2 * LOG(0.2) + 1.5 * LOG(0.4)), rel=1e-6)
    assert logprobs.grad is not None
    assert logprobs.grad.tolist() == pytest.approx([-2.0, 2.0, -1.5], rel=1e-6)


def test_report_by_hand() -> None:
    """r = 2, 1, 4: k3 = mean(r − 1 − log r), ESS = 7² / (3 · 21), one of three over the cap."""
    stats = token_stats(
        torch.tensor(NOW), torch.tensor(SAMPLED), torch.tensor(ADVANTAGES), torch.tensor([1.0, 2.0, 3.0]), cap=CAP
    )
    found = report(stats.sums, float(stats.max_abs_dlogp), num_actions=6)
    assert found.loss == pytest.approx(-(2 * LOG(0.5) - 2 * LOG(0.2) + 1.5 * LOG(0.4)) / 6, rel=1e-6)
    assert found.kl == pytest.approx((1 - LOG(2) + 0 + 3 - LOG(4)) / 3, rel=1e-6)
    assert found.mean_abs_dlogp == pytest.approx((LOG(2) + LOG(4)) / 3, rel=1e-6)
    assert found.max_abs_dlogp == pytest.approx(LOG(4), rel=1e-6)
    assert found.clip_fraction == pytest.approx(1 / 3)
    assert found.ess == pytest.approx(49 / 63, rel=1e-6)
    assert found.entropy == pytest.approx(2.0)
    assert found.num == 3


def test_on_policy_actions_report_no_difference() -> None:
    same = torch.tensor(NOW)
    stats = token_stats(same, same, torch.tensor(ADVANTAGES), torch.zeros(3), cap=CAP)
    found = report(stats.sums, float(stats.max_abs_dlogp), num_actions=3)
    assert (found.kl, found.mean_abs_dlogp, found.max_abs_dlogp, found.clip_fraction, found.ess) == (0, 0, 0, 0, 1)


def test_figures_of_rows_add_up() -> None:
    values = (torch.tensor(NOW), torch.tensor(SAMPLED), torch.tensor(ADVANTAGES), torch.tensor([1.0, 2.0, 3.0]))
    whole = token_stats(*values, cap=CAP)
    first, second = (token_stats(*(v[part] for v in values), cap=CAP) for part in (slice(0, 2), slice(2, 3)))
    assert (first.sums + second.sums).tolist() == pytest.approx(whole.sums.tolist(), rel=1e-9)


def test_a_broken_token_stays_a_number_that_the_report_shows() -> None:
    """The log-ratio ends at ±20, the reported difference does not."""
    now, sampled, advantage = torch.tensor([-1.0]), torch.tensor([-1000.0]), torch.tensor([1.0])
    assert math.isfinite(tis_loss(now, sampled, advantage, cap=1e30).item())
    stats = token_stats(now, sampled, advantage, torch.zeros(1), cap=CAP)
    assert stats.sums[SUMS.index("weight")].item() == pytest.approx(math.exp(20), rel=1e-6)
    assert stats.max_abs_dlogp.item() == pytest.approx(999.0)


def test_an_agent_without_tokens_here_adds_nothing() -> None:
    nothing = torch.zeros(0)
    stats = token_stats(nothing, nothing, nothing, nothing, cap=CAP)
    assert stats.sums.tolist() == [0.0] * len(SUMS)
    assert report(stats.sums, float(stats.max_abs_dlogp), num_actions=1).kl == 0.0


# ── optimizer ────────────────────────────────────────────────────────────────────────────────────


def optimizer(agent: str = "pro", *, own: AgentConfig | None = None, **train: object) -> AgentOptimizer:
    flat = torch.nn.Parameter(torch.tensor([1.0, -2.0, 3.0]))
    return AgentOptimizer(agent, flat, TrainConfig(**train), own or AgentConfig())  # type: ignore[arg-type]


def step(optimizer: AgentOptimizer, gradient: list[float]) -> float:
    optimizer.flat.grad = torch.tensor(gradient)
    lr = optimizer.step(optimizer.grad_norm(1))
    optimizer.forget_grad()
    return lr


def test_first_step_of_adam_moves_each_weight_by_the_learning_rate() -> None:
    """m̂ / √v̂ is the gradient's sign after one step, whatever its size."""
    adam = optimizer(lr=0.1, clip_norm=100.0)
    step(adam, [0.5, -0.25, 4.0])
    assert adam.flat.tolist() == pytest.approx([0.9, -1.9, 2.9], abs=1e-5)


def test_warm_up_goes_by_the_agents_own_steps() -> None:
    adam = optimizer(lr=0.4, warmup_steps=4)
    assert [step(adam, [1.0, 0.0, 0.0]) for _ in range(6)] == pytest.approx([0.1, 0.2, 0.3, 0.4, 0.4, 0.4])


def test_gradient_is_clipped_to_the_agents_norm() -> None:
    """Norm 5 clipped to 1: the first moment holds (1 − β₁) · g / 5."""
    adam = optimizer(clip_norm=1.0, betas=(0.5, 0.95))
    adam.flat.grad = torch.tensor([3.0, 4.0, 0.0])
    assert adam.grad_norm(1) == pytest.approx(5.0)
    step(adam, [3.0, 4.0, 0.0])
    assert adam.state()[0].tolist() == pytest.approx([0.3, 0.4, 0.0], rel=1e-5)


def test_small_gradient_is_left_alone() -> None:
    adam = optimizer(clip_norm=10.0, betas=(0.5, 0.95))
    step(adam, [3.0, 4.0, 0.0])
    assert adam.state()[0].tolist() == [1.5, 2.0, 0.0]


def test_an_agents_own_settings_come_first() -> None:
    adam = optimizer(own=AgentConfig(lr=0.25, clip_norm=0.5), lr=0.1, clip_norm=1.0, betas=(0.5, 0.95))
    assert step(adam, [3.0, 4.0, 0.0]) == 0.25
    assert adam.state()[0].tolist() == pytest.approx([0.15, 0.2, 0.0], rel=1e-5)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_gradient_that_is_not_finite_names_agent_and_step_and_changes_nothing(bad: float) -> None:
    adam = optimizer("con")
    before = adam.flat.detach().clone()
    adam.flat.grad = torch.tensor([1.0, bad, 0.0])
    with pytest.raises(TrainerError, match=r"con at step 7 is not finite"):
        adam.grad_norm(7)
    assert torch.equal(adam.flat.detach(), before)
    assert adam.num_steps == 0


def test_an_optimizer_that_is_not_stepped_keeps_everything() -> None:
    one, other = optimizer("pro", weight_decay=0.5), optimizer("con", weight_decay=0.5)
    step(other, [1.0, 1.0, 1.0])
    weights = other.flat.detach().clone()
    live_m, live_v, _ = other.state()
    m, v = live_m.clone(), live_v.clone()
    for _ in range(3):
        step(one, [1.0, 2.0, 3.0])
    assert torch.equal(other.flat.detach(), weights)
    assert torch.equal(other.state()[0], m)
    assert torch.equal(other.state()[1], v)
    assert other.state()[2] == 1


def test_restored_optimizer_goes_on_bit_for_bit() -> None:
    straight, first = optimizer(lr=0.1, warmup_steps=3), optimizer(lr=0.1, warmup_steps=3)
    gradients = [[0.1 * i, -0.2, 0.3 / (i + 1)] for i in range(4)]
    for g in gradients:
        step(straight, g)
    for g in gradients[:2]:
        step(first, g)
    second = optimizer(lr=0.1, warmup_steps=3)
    second.flat.data.copy_(first.flat.detach())
    second.restore(*first.state())
    for g in gradients[2:]:
        step(second, g)
    assert torch.equal(second.flat.detach(), straight.flat.detach())
