"""The loss of one agent's sampled tokens in one row, and the figures the step's report is made of. Pure functions.

    loss = − Σ weight · correction(π_old/μ) · surrogate(π/anchor, A)  +  kl · Σ weight · k(π, reference)  −  entropy · Σ weight · H(π)

divided by the agent's normaliser over all ranks. μ is the rollout engine's probability of the sampled token, π_old the
trainer's at the start of the step (in the first of several epochs that is π itself), the anchor one of the two.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from selfplay.config.schema import AlgorithmConfig
from selfplay.training.corrections import Correction, correct, log_ratio
from selfplay.training.surrogates import Surrogate, Tokens, surrogate

SUMS = (
    "num", "loss", "kl", "abs_dlogp", "clipped", "masked", "weight", "weight_squared", "entropy", "reference_kl",
)  # fmt: skip
OF_LAST_EPOCH = ("clipped", "masked")
"""Figures that say what the last update did; the others are from before the first one."""


@dataclass(frozen=True, kw_only=True)
class Samples:
    """N sampled tokens of one agent as recorded; all [N]."""

    rollout_logprobs: Tensor
    advantages: Tensor
    sequences: Tensor
    weights: Tensor


@dataclass(frozen=True, kw_only=True)
class Computed:
    """What the trainer computes for the same N tokens; all [N]."""

    logprobs: Tensor
    """log π, with gradient."""
    entropies: Tensor
    divergences: Tensor
    """KL(π ‖ reference) over the vocabulary."""
    reference_logprobs: Tensor | None = None


@dataclass(frozen=True)
class Kept:
    """From the first epoch for the later ones, without gradient; both [N]."""

    logprobs: Tensor
    """log π_old."""
    advantages: Tensor
    """With the reference's part in the reward, where it is there."""


@dataclass(frozen=True)
class TokenStats:
    """Sums over tokens that add up over rows and ranks: ``sums`` fp64 in the order of `SUMS`, ``max_abs_dlogp`` fp64 []."""

    sums: Tensor
    max_abs_dlogp: Tensor


@torch.no_grad()
def keep(config: AlgorithmConfig, samples: Samples, computed: Computed) -> Kept:
    """What a step's first epoch fixes for all its epochs."""
    advantages = samples.advantages
    if config.kl and config.kl_in == "reward":
        advantages = advantages - config.kl * reference_kl(config, computed)
    return Kept(computed.logprobs.detach(), advantages)


def agent_loss(config: AlgorithmConfig, samples: Samples, computed: Computed, kept: Kept) -> tuple[Tensor, TokenStats]:
    """The summed loss [] before the normaliser, and its figures."""
    log_r = log_ratio(kept.logprobs, samples.rollout_logprobs)
    if config.anchor == "trainer":
        anchor, correction = kept.logprobs, correct(config, log_r, samples.sequences)
    else:
        anchor = samples.rollout_logprobs
        correction = correct(_UNCORRECTED, log_r, samples.sequences)
    found = surrogate(
        config,
        Tokens(logprobs=computed.logprobs, anchor=anchor, advantages=kept.advantages, sequences=samples.sequences),
    )
    loss = -(samples.weights * correction.weights * found.gain).sum()
    if config.kl and config.kl_in == "loss":
        loss = loss + config.kl * (samples.weights * reference_kl(config, computed)).sum()
    if config.entropy:
        loss = loss - config.entropy * (samples.weights * computed.entropies).sum()
    return loss, _stats(samples, computed, log_r, correction, found, loss)


def reference_kl(config: AlgorithmConfig, computed: Computed) -> Tensor:
    """An estimate of KL(π ‖ reference) for each token [N] (k1, k2, k3: Schulman 2020, "Approximating KL divergence")."""
    if config.kl_estimator == "full":
        return computed.divergences
    if computed.reference_logprobs is None:
        raise ValueError(f"kl_estimator={config.kl_estimator} needs the reference's log-probabilities")
    log_q_over_p = computed.reference_logprobs - computed.logprobs
    match config.kl_estimator:
        case "k1":
            return -log_q_over_p
        case "k2":
            return 0.5 * log_q_over_p.square()
        case "k3":
            return log_q_over_p.exp() - 1 - log_q_over_p


_UNCORRECTED = AlgorithmConfig(correction="none")


@torch.no_grad()
def _stats(
    samples: Samples, computed: Computed, log_r: Tensor, correction: Correction, found: Surrogate, loss: Tensor
) -> TokenStats:
    r = log_r.double().exp()
    abs_dlogp = (computed.logprobs - samples.rollout_logprobs).double().abs()
    terms = (
        torch.ones_like(r), None, r - 1 - log_r.double(), abs_dlogp, (correction.capped | found.clipped).double(),
        (correction.masked | found.masked).double(), r, r * r, computed.entropies.double(),
        computed.divergences.double(),
    )  # fmt: skip
    sums = [loss.double() if t is None else t.sum() for t in terms]
    worst = abs_dlogp.max() if len(abs_dlogp) else abs_dlogp.new_zeros(())
    return TokenStats(torch.stack(sums), worst)


@dataclass(frozen=True, kw_only=True)
class TokenReport:
    """Means over all tokens of one agent in one step."""

    loss: float
    kl: float
    """k3 estimate of KL(rollout ‖ trainer): mean of r − 1 − log r under μ."""
    mean_abs_dlogp: float
    max_abs_dlogp: float
    clip_fraction: float
    """Of the last epoch: tokens whose ratio was clipped or whose correction was capped."""
    mask_fraction: float
    """Of the last epoch: tokens left out by rule."""
    ess: float
    """(Σ r)² / (N · Σ r²) of the untruncated weights."""
    entropy: float
    reference_kl: float
    num: int


def report(sums: Tensor, max_abs_dlogp: float, normaliser: float) -> TokenReport:
    """Sums over all ranks → means. ``normaliser`` is what the loss is divided by."""
    s = dict(zip(SUMS, sums.tolist(), strict=True))
    num = max(s["num"], 1.0)
    ess = s["weight"] ** 2 / (num * s["weight_squared"]) if s["weight_squared"] else 0.0
    return TokenReport(
        loss=s["loss"] / normaliser, kl=s["kl"] / num, mean_abs_dlogp=s["abs_dlogp"] / num, max_abs_dlogp=max_abs_dlogp,
        clip_fraction=s["clipped"] / num, mask_fraction=s["masked"] / num, ess=ess, entropy=s["entropy"] / num,
        reference_kl=s["reference_kl"] / num, num=int(s["num"]),
    )  # fmt: skip
