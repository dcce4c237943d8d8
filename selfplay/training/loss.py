"""The policy-gradient loss with truncated importance sampling, and what is reported about a step. Pure functions.

With μ the probability under which an action was sampled, π the trainer's at the start of the step, r = π/μ, advantage A
and N the agent's actions over all ranks:

    loss = −Σ sg(min(r, cap)) · A · log π / N          (sg: no gradient through the weight)

The figures are sums over actions, so that rows and ranks add up: `action_sums` per row, added, then `report`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from selfplay.wire.messages import AgentReport

MAX_LOG_RATIO = 20.0
NUM_SUMS = 8
_LOSS, _K3, _ABS, _CLIPPED, _RATIO, _RATIO_SQUARED, _ENTROPY, _COUNT = range(NUM_SUMS)


def log_ratios(logprobs: Tensor, rollout_logprobs: Tensor) -> Tensor:
    """log π − log μ [N], clamped to ±20, without gradient."""
    return (logprobs.detach() - rollout_logprobs).clamp_(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def policy_loss(
    logprobs: Tensor, rollout_logprobs: Tensor, advantages: Tensor, *, cap: float, num_actions: int
) -> Tensor:
    """The loss of one agent's actions [N] in a row, normalised by its ``num_actions`` over all rows and ranks."""
    weights = log_ratios(logprobs, rollout_logprobs).exp().clamp(max=cap)
    return -(weights * advantages * logprobs).sum() / num_actions


def action_sums(
    logprobs: Tensor, rollout_logprobs: Tensor, entropies: Tensor, *, loss: Tensor, cap: float
) -> tuple[Tensor, Tensor]:
    """(sums [8] over the actions [N], largest |log π − log μ|), float64, without gradient."""
    logs = log_ratios(logprobs, rollout_logprobs).double()
    ratios = logs.exp()
    distance = (logprobs.detach() - rollout_logprobs).abs().double()
    sums = torch.stack([
        loss.detach().double(), (ratios - 1.0 - logs).sum(), distance.sum(), (ratios > cap).double().sum(),
        ratios.sum(), ratios.square().sum(), entropies.double().sum(), ratios.new_tensor(float(len(ratios))),
    ])  # fmt: skip
    return sums, distance.max() if len(distance) else distance.new_zeros(())


def report(sums: Tensor, largest: float, *, moved: bool, grad_norm: float, lr: float) -> AgentReport:
    """The report of one agent from its sums [8] over all rows and ranks.

    ``kl``: Schulman's k3 estimate, E[r − 1 − log r] under μ, of KL(rollout ‖ trainer). ``ess``: (Σr)² / (N Σr²) of the ratios
    before truncation.
    """
    values = sums.tolist()
    num = max(values[_COUNT], 1.0)
    return AgentReport(
        moved=moved, loss=values[_LOSS], grad_norm=grad_norm, lr=lr, kl=values[_K3] / num,
        mean_abs_dlogp=values[_ABS] / num, max_abs_dlogp=largest, clip_fraction=values[_CLIPPED] / num,
        ess=values[_RATIO] ** 2 / (num * max(values[_RATIO_SQUARED], 1e-300)), entropy=values[_ENTROPY] / num,
        num_actions=int(values[_COUNT]),
    )  # fmt: skip
