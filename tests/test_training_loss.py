"""Loss, report and optimizer against figures worked out by hand."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from selfplay.config.schema import AgentConfig, AlgorithmConfig, TrainConfig
from selfplay.errors import TrainerError
from selfplay.training.loss import SUMS, Computed, Kept, Samples, TokenReport, agent_loss, keep, reference_kl, report
from selfplay.training.optimizer import AgentOptimizer, schedule_share

LOG = math.log
NOW = [LOG(0.5), LOG(0.2), LOG(0.4)]
SAMPLED = [LOG(0.25), LOG(0.2), LOG(0.1)]
"""Ratios π/μ: 2, 1, 4."""
ADVANTAGES = [1.0, -2.0, 0.5]
ENTROPIES, DIVERGENCES, REFERENCE = [1.0, 2.0, 3.0], [0.5, 0.0, 0.25], [LOG(0.25), LOG(0.2), LOG(0.8)]


def samples(part: slice = slice(None)) -> Samples:
    return Samples(
        rollout_logprobs=torch.tensor(SAMPLED[part]), advantages=torch.tensor(ADVANTAGES[part]),
        sequences=torch.arange(len(SAMPLED[part])), weights=torch.tensor([1.0, 0.5, 2.0][part]),
    )  # fmt: skip


def computed(part: slice = slice(None), now: list[float] | None = None) -> Computed:
    return Computed(
        logprobs=torch.tensor((now or NOW)[part], requires_grad=True), entropies=torch.tensor(ENTROPIES[part]),
        divergences=torch.tensor(DIVERGENCES[part]), reference_logprobs=torch.tensor(REFERENCE[part]),
    )  # fmt: skip


def loss_of(part: slice = slice(None), **settings: Any) -> tuple[torch.Tensor, torch.Tensor, TokenReport]:
    """(loss, its gradient by log π, report)."""
    config = AlgorithmConfig(tis_cap=3.0, **settings)
    s, c = samples(part), computed(part)
    loss, stats = agent_loss(config, s, c, keep(config, s, c))
    (slope,) = torch.autograd.grad(loss, c.logprobs)
    return loss.detach(), slope, report(stats.sums, float(stats.max_abs_dlogp), normaliser=6.0)


def test_loss_weighs_each_action_by_its_truncated_ratio() -> None:
    """−(2·1·log ½ + ½·1·(−2)·log ⅕ + 2·3·½·log ⅖), and the weights carry no gradient."""
    loss, slope, found = loss_of()
    wanted = -(2 * LOG(0.5) - LOG(0.2) + 3 * LOG(0.4))
    assert loss.item() == pytest.approx(wanted, rel=1e-6)
    assert slope.tolist() == pytest.approx([-2.0, 1.0, -3.0], rel=1e-6)
    assert found.loss == pytest.approx(wanted / 6, rel=1e-6)


def test_report_by_hand() -> None:
    """r = 2, 1, 4: k3 = mean(r − 1 − log r), ESS = 7² / (3 · 21), one of three over the cap."""
    *_, found = loss_of()
    assert found.kl == pytest.approx((1 - LOG(2) + 0 + 3 - LOG(4)) / 3, rel=1e-6)
    assert found.mean_abs_dlogp == pytest.approx((LOG(2) + LOG(4)) / 3, rel=1e-6)
    assert found.max_abs_dlogp == pytest.approx(LOG(4), rel=1e-6)
    assert (found.clip_fraction, found.mask_fraction) == pytest.approx((1 / 3, 0.0))
    assert found.ess == pytest.approx(49 / 63, rel=1e-6)
    assert found.entropy == pytest.approx(2.0)
    assert found.reference_kl == pytest.approx(0.25)
    assert found.num == 3


def test_tokens_left_out_are_counted_and_do_not_shrink_the_denominator() -> None:
    """icepop keeps r in [.5, 3]: the third token has no gradient; 6 is still what the loss is divided by."""
    loss, slope, found = loss_of(correction="icepop", keep_ratio=(0.5, 3.0))
    assert slope.tolist() == pytest.approx([-2.0, 1.0, 0.0])
    assert (found.clip_fraction, found.mask_fraction) == pytest.approx((0.0, 1 / 3))
    assert found.loss == pytest.approx(loss.item() / 6)


def test_a_loss_anchored_to_the_rollout_clips_its_ratio() -> None:
    """ρ = π/μ = 2, 1, 4 with A = 1, −2, ½: ppo stops at 1.2 and .6 on the way up; no other correction is applied."""
    loss, slope, found = loss_of(loss="ppo", anchor="rollout", correction="none")
    assert loss.item() == pytest.approx(-(1.2 - 0.5 * 2 + 2 * 0.6), rel=1e-6)
    assert slope.tolist() == pytest.approx([0.0, 1.0, 0.0])
    assert found.clip_fraction == pytest.approx(2 / 3)


def test_entropy_and_divergence_are_weighted_sums() -> None:
    """Entropies 1, 2, 3 and divergences ½, 0, ¼ with weights 1, ½, 2."""
    plain, *_ = loss_of()
    assert loss_of(entropy=0.1)[0].item() == pytest.approx(plain.item() - 0.1 * (1 + 1 + 6), rel=1e-6)
    assert loss_of(kl=0.2)[0].item() == pytest.approx(plain.item() + 0.2 * (0.5 + 0 + 0.5), rel=1e-6)


@pytest.mark.parametrize(
    ("name", "values", "slopes"),
    [
        ("k1", [LOG(2), 0, -LOG(2)], [1, 1, 1]),
        ("k2", [LOG(2) ** 2 / 2, 0, LOG(2) ** 2 / 2], [LOG(2), 0, -LOG(2)]),
        ("k3", [0.5 - 1 + LOG(2), 0, 2 - 1 - LOG(2)], [0.5, 0, -1]),
    ],
)
def test_estimators_of_the_divergence(name: str, values: list[float], slopes: list[float]) -> None:
    """q/p = ½, 1, 2: k1 = −log(q/p), k2 = ½ log²(q/p), k3 = q/p − 1 − log(q/p); d/dlog p is 1, −log(q/p), 1 − q/p."""
    c = computed()
    found = reference_kl(AlgorithmConfig(kl_estimator=name), c)  # type: ignore[arg-type]
    (slope,) = torch.autograd.grad(found.sum(), c.logprobs)
    assert found.tolist() == pytest.approx(values, abs=1e-6)
    assert slope.tolist() == pytest.approx(slopes, abs=1e-6)


def test_divergence_in_the_reward_lowers_the_advantage() -> None:
    """A − ½ · k1: 1 − ½ log 2, −2, ½ + ½ log 2; kept without gradient for all epochs."""
    config = AlgorithmConfig(kl=0.5, kl_in="reward", kl_estimator="k1")
    kept = keep(config, samples(), computed())
    assert kept.advantages.tolist() == pytest.approx([1 - LOG(2) / 2, -2, 0.5 + LOG(2) / 2])
    assert not kept.advantages.requires_grad


def test_later_epochs_are_measured_from_the_first() -> None:
    """π moved to 1.5 π_old: ppo stops at 1.2, whatever μ is; the correction stays that of the first epoch."""
    config = AlgorithmConfig(loss="ppo", correction="none")
    moved = computed(now=[x + LOG(1.5) for x in NOW])
    loss, stats = agent_loss(config, samples(), moved, Kept(torch.tensor(NOW), torch.tensor(ADVANTAGES)))
    assert loss.item() == pytest.approx(-(1.2 * 1 - 0.5 * 2 * 1.5 + 2 * 1.2 * 0.5), rel=1e-5)
    assert report(stats.sums, 0.0, 1.0).clip_fraction == pytest.approx(2 / 3)


def test_on_policy_actions_report_no_difference() -> None:
    config, same = AlgorithmConfig(), computed(now=SAMPLED)
    _, stats = agent_loss(config, samples(), same, keep(config, samples(), same))
    found = report(stats.sums, float(stats.max_abs_dlogp), 3.0)
    assert (found.kl, found.mean_abs_dlogp, found.max_abs_dlogp, found.clip_fraction, found.ess) == (0, 0, 0, 0, 1)


def test_figures_of_rows_add_up() -> None:
    config = AlgorithmConfig()

    def sums(part: slice) -> torch.Tensor:
        s, c = samples(part), computed(part)
        return agent_loss(config, s, c, keep(config, s, c))[1].sums

    whole = sums(slice(None))
    assert (sums(slice(0, 2)) + sums(slice(2, 3))).tolist() == pytest.approx(whole.tolist(), rel=1e-6)


def test_an_agent_without_tokens_here_adds_nothing() -> None:
    _, _, found = loss_of(slice(0, 0), loss="gspo", correction="sequence_tis", kl=0.1, entropy=0.1)
    assert (found.loss, found.kl, found.num) == (0.0, 0.0, 0)
    assert len(SUMS) == 10


# ── optimizer ────────────────────────────────────────────────────────────────────────────────────


def optimizer(agent: str = "pro", *, own: AgentConfig | None = None, **train: object) -> AgentOptimizer:
    flat = torch.nn.Parameter(torch.tensor([1.0, -2.0, 3.0]))
    return AgentOptimizer(agent, flat, TrainConfig(**train), own or AgentConfig())  # type: ignore[arg-type]


def step(optimizer: AgentOptimizer, gradient: list[float]) -> float:
    optimizer.flat.grad = torch.tensor(gradient)
    lr = optimizer.step(optimizer.grad_norm(1))
    optimizer.forget_grad()
    optimizer.end_step(moved=True)
    return lr


def test_first_step_of_adam_moves_each_weight_by_the_learning_rate() -> None:
    """m̂ / √v̂ is the gradient's sign after one step, whatever its size."""
    adam = optimizer(lr=0.1, clip_norm=100.0)
    step(adam, [0.5, -0.25, 4.0])
    assert adam.flat.tolist() == pytest.approx([0.9, -1.9, 2.9], abs=1e-5)


def test_warm_up_goes_by_the_agents_own_steps() -> None:
    adam = optimizer(lr=0.4, warmup_steps=4)
    assert [step(adam, [1.0, 0.0, 0.0]) for _ in range(6)] == pytest.approx([0.1, 0.2, 0.3, 0.4, 0.4, 0.4])


def test_updates_of_one_step_have_one_learning_rate() -> None:
    adam = optimizer(lr=0.4, warmup_steps=4)
    rates = []
    for _ in range(2):
        for _ in range(3):
            adam.flat.grad = torch.ones(3)
            rates.append(adam.step(adam.grad_norm(1)))
        adam.end_step(moved=True)
    assert rates == pytest.approx([0.1] * 3 + [0.2] * 3)
    assert (adam.num_steps, adam.num_updates) == (2, 6)


def test_schedules_by_hand() -> None:
    """Two steps of warm-up, then eight down to a tenth: linear by steps of .9/8, cosine half-way at .55."""
    linear, cosine = (
        TrainConfig(steps=10, warmup_steps=2, schedule=s, final_lr_share=0.1)  # type: ignore[arg-type]
        for s in ("linear", "cosine")
    )
    assert [schedule_share(linear, n) for n in (0, 1, 2, 6, 10, 50)] == pytest.approx([0.5, 1, 1, 0.55, 0.1, 0.1])
    assert [schedule_share(cosine, n) for n in (2, 4, 6, 10)] == pytest.approx([1, 0.1 + 0.9 * 0.8535534, 0.55, 0.1])
    assert schedule_share(TrainConfig(steps=10), 9) == 1.0


def test_a_decay_that_ends_before_the_run_by_hand() -> None:
    """Of 30 steps one warms up and four fall to .2: 1, .8, .6, .4, and .2 from the fifth to the last and after."""
    linear, cosine = (
        TrainConfig(steps=30, warmup_steps=1, schedule=s, decay_steps=5, final_lr_share=0.2)  # type: ignore[arg-type]
        for s in ("linear", "cosine")
    )
    shares = [schedule_share(linear, n) for n in (0, 1, 2, 3, 4, 5, 29, 90)]
    assert shares == pytest.approx([1, 1, 0.8, 0.6, 0.4, 0.2, 0.2, 0.2])
    assert [schedule_share(cosine, n) for n in (1, 3, 5, 29)] == pytest.approx([1, 0.6, 0.2, 0.2])


def test_a_decay_that_ends_after_the_run_is_cut_off() -> None:
    assert schedule_share(TrainConfig(steps=5, schedule="linear", decay_steps=20), 5) == pytest.approx(0.75)


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
    live_m, live_v, *_ = other.state()
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
