"""Policy losses by name: what is done with the ratio ρ of the policy to its anchor. Pure functions of N sampled tokens.

A is a token's advantage. What is maximised per token, sg() carrying no gradient:

    reinforce   sg(ρ) · A · log π                                       policy gradient (Williams 1992)
    ppo         min(ρ · A, clip(ρ, 1 − low, 1 + high) · A)               Schulman et al. 2017, arXiv:1707.06347
    gspo        the same with s = exp(mean log ρ over the sequence)      Zheng et al. 2025, arXiv:2507.18071
    cispo       sg(clip(ρ, 1 − low, 1 + high)) · A · log π               MiniMax-M1, arXiv:2506.13585
    dppo_tv     ρ · A, without tokens that moved far enough already: A > 0 and π − anchor > bound, or A < 0 and π − anchor < −bound
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from selfplay.config.schema import AlgorithmConfig
from selfplay.training.corrections import MAX_LOG_RATIO, sequence_mean


@dataclass(frozen=True)
class Surrogate:
    """What is maximised, token by token."""

    gain: Tensor
    """[N] with gradient."""
    clipped: Tensor
    """[N] bool: the ratio was clipped."""
    masked: Tensor
    """[N] bool: the token has no gradient by rule."""


@dataclass(frozen=True, kw_only=True)
class Tokens:
    """N sampled tokens of one agent."""

    logprobs: Tensor
    """[N] log π, with gradient."""
    anchor: Tensor
    """[N] log-probabilities of the anchor."""
    advantages: Tensor
    """[N]."""
    sequences: Tensor
    """[N] long: tokens of one sequence have one number."""


def surrogate(config: AlgorithmConfig, tokens: Tokens) -> Surrogate:
    """The policy loss that ``config.loss`` names, with its sign turned: higher is better."""
    return SURROGATES[config.loss](config, tokens)


def _reinforce(_: AlgorithmConfig, t: Tokens) -> Surrogate:
    ratio = _ratio(t).detach()
    return _unclipped(ratio * t.advantages * t.logprobs)


def _ppo(config: AlgorithmConfig, t: Tokens) -> Surrogate:
    return _clipped_min(config, _ratio(t), t.advantages)


def _gspo(config: AlgorithmConfig, t: Tokens) -> Surrogate:
    """Per token, so that tokens of one sequence may have advantages of their own: s keeps the value of the sequence's
    ratio, and its gradient is that of the token's own log-probability."""
    log_s = sequence_mean(_log_ratio(t).detach(), t.sequences)
    return _clipped_min(config, log_s.exp() * (t.logprobs - t.logprobs.detach()).exp(), t.advantages)


def _cispo(config: AlgorithmConfig, t: Tokens) -> Surrogate:
    ratio = _ratio(t).detach()
    weights = _clip(config, ratio)
    no = torch.zeros_like(ratio, dtype=torch.bool)
    return Surrogate(weights * t.advantages * t.logprobs, weights != ratio, no)


def _dppo_tv(config: AlgorithmConfig, t: Tokens) -> Surrogate:
    moved = t.logprobs.detach().exp() - t.anchor.exp()
    far = ((t.advantages > 0) & (moved > config.tv_bound)) | ((t.advantages < 0) & (moved < -config.tv_bound))
    gain = (_ratio(t) * t.advantages).masked_fill(far, 0.0)
    return Surrogate(gain, torch.zeros_like(far), far)


def _clipped_min(config: AlgorithmConfig, ratio: Tensor, advantages: Tensor) -> Surrogate:
    plain, bounded = ratio * advantages, _clip(config, ratio) * advantages
    clipped = (bounded < plain).detach()
    return Surrogate(torch.minimum(plain, bounded), clipped, torch.zeros_like(clipped))


def _unclipped(gain: Tensor) -> Surrogate:
    no = torch.zeros_like(gain, dtype=torch.bool)
    return Surrogate(gain, no, no)


def _clip(config: AlgorithmConfig, ratio: Tensor) -> Tensor:
    return ratio.clamp(1.0 - config.clip_low, 1.0 + config.clip_high)


def _log_ratio(t: Tokens) -> Tensor:
    return (t.logprobs - t.anchor).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def _ratio(t: Tokens) -> Tensor:
    return _log_ratio(t).exp()


SURROGATES: dict[str, Callable[[AlgorithmConfig, Tokens], Surrogate]] = {
    "reinforce": _reinforce, "ppo": _ppo, "gspo": _gspo, "cispo": _cispo, "dppo_tv": _dppo_tv,
}  # fmt: skip
