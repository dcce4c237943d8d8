"""Off-policy corrections by name: from log(π_old/μ) of N sampled tokens to a weight for each.

μ is the rollout engine's probability of a sampled token, π_old the trainer's at the start of the step. The weights carry
no gradient; a weight of 0 takes the token out of the loss but not out of the loss's denominator.

    importance     r = π_old/μ                  decoupled PPO (Hilton et al. 2021, arXiv:2110.00641)
    token_tis      min(r, cap)                  truncated importance sampling, per token (IMPALA, arXiv:1802.01561)
    sequence_tis   min(∏ r, cap)                the same for a whole sequence
    icepop         r where lo ≤ r ≤ hi, else 0  IcePop (Ling team, 2025)
    geometric      1 where lo ≤ exp(mean log r) ≤ hi over the sequence, else 0
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from selfplay.config.schema import AlgorithmConfig

MAX_LOG_RATIO = 20.0


@dataclass(frozen=True)
class Correction:
    """What a correction says of N tokens."""

    weights: Tensor
    """[N]."""
    capped: Tensor
    """[N] bool: a weight was cut down."""
    masked: Tensor
    """[N] bool: the token is left out."""


@torch.no_grad()
def log_ratio(new: Tensor, old: Tensor) -> Tensor:
    """log(new/old) [N] of log-probabilities, clamped to ±20 so that a broken token stays a number that the report shows."""
    return (new - old).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


@torch.no_grad()
def correct(config: AlgorithmConfig, log_r: Tensor, sequences: Tensor) -> Correction:
    """The correction that ``config`` names; ``log_r`` [N] from `log_ratio`, ``sequences`` [N] long says whose token it is."""
    return CORRECTIONS[config.correction](config, log_r, sequences)


def sequence_mean(values: Tensor, sequences: Tensor) -> Tensor:
    """Mean of ``values`` over each token's own sequence [N]."""
    return sequence_sum(values, sequences) / sequence_sum(torch.ones_like(values), sequences)


def sequence_sum(values: Tensor, sequences: Tensor) -> Tensor:
    """Sum of ``values`` over each token's own sequence [N]."""
    if not len(values):
        return values
    totals = values.new_zeros(int(sequences.max()) + 1).index_add(0, sequences, values)
    return totals[sequences]


def _none(_: AlgorithmConfig, log_r: Tensor, __: Tensor) -> Correction:
    return _kept(torch.ones_like(log_r))


def _importance(_: AlgorithmConfig, log_r: Tensor, __: Tensor) -> Correction:
    return _kept(log_r.exp())


def _token_tis(config: AlgorithmConfig, log_r: Tensor, _: Tensor) -> Correction:
    return _truncated(log_r.exp(), config.tis_cap)


def _sequence_tis(config: AlgorithmConfig, log_r: Tensor, sequences: Tensor) -> Correction:
    whole = sequence_sum(log_r, sequences).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    return _truncated(whole.exp(), config.tis_cap)


def _icepop(config: AlgorithmConfig, log_r: Tensor, _: Tensor) -> Correction:
    r = log_r.exp()
    return _masked(r, _outside(r, config.keep_ratio))


def _geometric(config: AlgorithmConfig, log_r: Tensor, sequences: Tensor) -> Correction:
    mean = sequence_mean(log_r, sequences).exp()
    return _masked(torch.ones_like(log_r), _outside(mean, config.keep_mean_ratio))


def _kept(weights: Tensor) -> Correction:
    nowhere = torch.zeros_like(weights, dtype=torch.bool)
    return Correction(weights, nowhere, nowhere)


def _truncated(r: Tensor, cap: float) -> Correction:
    return Correction(r.clamp(max=cap), r > cap, torch.zeros_like(r, dtype=torch.bool))


def _masked(weights: Tensor, out: Tensor) -> Correction:
    return Correction(weights.masked_fill(out, 0.0), torch.zeros_like(out), out)


def _outside(r: Tensor, bounds: tuple[float, float]) -> Tensor:
    return (r < bounds[0]) | (r > bounds[1])


CORRECTIONS: dict[str, Callable[[AlgorithmConfig, Tensor, Tensor], Correction]] = {
    "none": _none, "importance": _importance, "token_tis": _token_tis, "sequence_tis": _sequence_tis, "icepop": _icepop,
    "geometric": _geometric,
}  # fmt: skip
