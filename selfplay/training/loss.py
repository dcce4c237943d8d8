"""Policy gradient with truncated importance sampling (TIS), as pure functions of one agent's action tokens.

    loss = − Σ sg(min(π_old / μ, cap)) · A · log π          divided by the agent's action tokens over all ranks

μ is the rollout engine's probability of the sampled token, π the trainer's. One step is taken per batch, so π_old is the
value of π in the same forward pass. Source of the correction: IMPALA (Espeholt et al., 2018), per token.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

MAX_LOG_RATIO = 20.0
SUMS = ("num", "loss", "kl", "abs_dlogp", "clipped", "weight", "weight_squared", "entropy")


@dataclass(frozen=True)
class TokenStats:
    """Sums over tokens that add up over rows and ranks: ``sums`` fp64 in the order of `SUMS`, ``max_abs_dlogp`` fp64 []."""

    sums: Tensor
    max_abs_dlogp: Tensor


def tis_loss(logprobs: Tensor, rollout_logprobs: Tensor, advantages: Tensor, *, cap: float) -> Tensor:
    """The summed loss [] of N tokens; gradients flow through ``logprobs`` only."""
    weights = log_ratio(logprobs, rollout_logprobs).exp().clamp(max=cap)
    return -(weights * advantages * logprobs).sum()


@torch.no_grad()
def log_ratio(logprobs: Tensor, rollout_logprobs: Tensor) -> Tensor:
    """log(π/μ) [N], clamped to ±20 so that a broken token stays a number that the report shows."""
    return (logprobs - rollout_logprobs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


@torch.no_grad()
def token_stats(
    logprobs: Tensor, rollout_logprobs: Tensor, advantages: Tensor, entropies: Tensor, *, cap: float
) -> TokenStats:
    """What the step's report is made of; all inputs [N]."""
    log_r = log_ratio(logprobs, rollout_logprobs).double()
    r = log_r.exp()
    abs_dlogp = (logprobs - rollout_logprobs).double().abs()
    loss = -(r.clamp(max=cap) * advantages * logprobs)
    terms = (torch.ones_like(r), loss, r - 1 - log_r, abs_dlogp, (r > cap).double(), r, r * r, entropies.double())
    worst = abs_dlogp.max() if len(abs_dlogp) else abs_dlogp.new_zeros(())
    return TokenStats(torch.stack([t.sum() for t in terms]), worst)


@dataclass(frozen=True, kw_only=True)
class TokenReport:
    """Means over all tokens of one agent in one step, before the update."""

    loss: float
    kl: float
    """k3 estimate of KL(rollout ‖ trainer): mean of r − 1 − log r under μ (Schulman, 2020)."""
    mean_abs_dlogp: float
    max_abs_dlogp: float
    clip_fraction: float
    ess: float
    """(Σ r)² / (N · Σ r²) of the untruncated weights."""
    entropy: float
    num: int


def report(sums: Tensor, max_abs_dlogp: float, num_actions: int) -> TokenReport:
    """Sums over all ranks → means. ``num_actions`` is the normaliser of the loss."""
    s = dict(zip(SUMS, sums.tolist(), strict=True))
    num = max(s["num"], 1.0)
    ess = s["weight"] ** 2 / (num * s["weight_squared"]) if s["weight_squared"] else 0.0
    return TokenReport(
        loss=s["loss"] / num_actions, kl=s["kl"] / num, mean_abs_dlogp=s["abs_dlogp"] / num, max_abs_dlogp=max_abs_dlogp,
        clip_fraction=s["clipped"] / num, ess=ess, entropy=s["entropy"] / num, num=int(s["num"]),
    )  # fmt: skip
