"""One player against another: score, Elo and normalised Elo with intervals, likelihood of superiority, and sequential tests.

Scores are per game (loss 0, draw 1/2, win 1) or, better, per pair of games on one deal with the seats swapped (pentanomial: 0,
1/4, 1/2, 3/4, 1), which is immune to what the deal gives away. The sequential test is the generalised SPRT on the empirical
distribution of scores (Van den Bergh, 2019): the likelihood ratio of the two hypotheses, each fitted as closely to the data as
its Elo allows.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

import msgspec

from selfplay.errors import ConfigError

NORMALISED_ELO = 800.0 / math.log(10.0)
"""Normalised Elo of a mean score one standard deviation (of a game) above 1/2."""
_FLOOR = 1e-6
"""Counts of scores that did not occur, so that every score stays possible."""
_Z95 = 1.959963984540054


class Scores(msgspec.Struct, frozen=True, kw_only=True):
    """How often each score occurred. ``games`` per observation: 1, or 2 for pairs."""

    values: tuple[float, ...]
    counts: tuple[float, ...]
    games: int

    @property
    def num(self) -> float:
        return sum(self.counts)

    def distribution(self, floor: float = 0.0) -> list[tuple[float, float]]:
        """(score, probability); with ``floor`` no count is smaller than that."""
        counts = [max(c, floor) for c in self.counts]
        total = sum(counts)
        return [(v, c / total) for v, c in zip(self.values, counts, strict=True)]


def trinomial(wins: float, draws: float, losses: float) -> Scores:
    """Games one by one."""
    return Scores(values=(0.0, 0.5, 1.0), counts=(losses, draws, wins), games=1)


def pentanomial(counts: Sequence[float]) -> Scores:
    """Pairs of games: how often they brought 0, 1/2, 1, 3/2 and 2 points."""
    if len(counts) != 5:
        raise ValueError(f"{len(counts)} counts; pairs have five: 0, 1/2, 1, 3/2 and 2 points")
    return Scores(values=(0.0, 0.25, 0.5, 0.75, 1.0), counts=tuple(counts), games=2)


class MatchStats(msgspec.Struct, frozen=True, kw_only=True):
    """What a match says. Intervals at 95 %, as half widths; infinite scores have no Elo (None)."""

    score: float
    elo: float | None
    elo_error: float | None
    normalised_elo: float
    normalised_error: float
    los: float
    """Likelihood of superiority."""
    num: float


def match_stats(scores: Scores) -> MatchStats:
    """Elo, normalised Elo and likelihood of superiority. Raises ValueError for a match without games."""
    if not scores.num > 0:
        raise ValueError("no games: nothing can be said")
    mean, variance = _moments(scores.distribution())
    if variance <= 0:  # all scores equal: as good as sure that they are not always
        variance = _moments(scores.distribution(_FLOOR))[1]
    error = _Z95 * math.sqrt(variance / scores.num)
    per_game = math.sqrt(variance * scores.games)
    low, high = logistic_elo(mean - error), logistic_elo(mean + error)
    return MatchStats(
        score=mean, elo=logistic_elo(mean), elo_error=None if low is None or high is None else (high - low) / 2,
        normalised_elo=(mean - 0.5) / per_game * NORMALISED_ELO, normalised_error=error / per_game * NORMALISED_ELO,
        los=0.5 * (1 + math.erf((mean - 0.5) / math.sqrt(2 * variance / scores.num))), num=scores.num,
    )  # fmt: skip


def logistic_elo(score: float) -> float | None:
    """Elo difference of an expected score; None outside (0, 1)."""
    return -400.0 * math.log10(1.0 / score - 1.0) if 0.0 < score < 1.0 else None


def expected_score(elo: float) -> float:
    """Expected score of an Elo difference."""
    return float(1.0 / (1.0 + 10.0 ** (-elo / 400.0)))


class Hypotheses(msgspec.Struct, frozen=True, kw_only=True):
    """H0: the difference is ``elo0``; H1: it is ``elo1``. ``alpha``, ``beta``: how often each may be wrongly rejected."""

    elo0: float
    elo1: float
    alpha: float = 0.05
    beta: float = 0.05
    model: Literal["logistic", "normalised"] = "logistic"

    def __post_init__(self) -> None:
        if not (math.isfinite(self.elo0) and math.isfinite(self.elo1) and self.elo0 < self.elo1):
            raise ConfigError(f"a sequential test needs elo0 < elo1, not {self.elo0:g} and {self.elo1:g}")
        if not (0 < self.alpha < 0.5 and 0 < self.beta < 0.5):
            raise ConfigError(f"alpha={self.alpha:g} and beta={self.beta:g} must lie between 0 and 0.5")

    @property
    def bounds(self) -> tuple[float, float]:
        """(accept H0 at or below, accept H1 at or above)."""
        return math.log(self.beta / (1 - self.alpha)), math.log((1 - self.beta) / self.alpha)


class SprtState(msgspec.Struct, frozen=True, kw_only=True):
    """Where a sequential test stands."""

    llr: float
    lower: float
    upper: float
    decision: Literal["H0", "H1"] | None


def sprt(scores: Scores, hypotheses: Hypotheses) -> SprtState:
    """The log likelihood ratio of the scores so far, and whether it has decided."""
    lower, upper = hypotheses.bounds
    llr = log_likelihood_ratio(scores, hypotheses) if scores.num else 0.0
    return SprtState(
        llr=llr, lower=lower, upper=upper, decision="H1" if llr >= upper else "H0" if llr <= lower else None
    )  # fmt: skip


def log_likelihood_ratio(scores: Scores, hypotheses: Hypotheses) -> float:
    """Log likelihood ratio of H1 to H0."""
    seen = scores.distribution(_FLOOR)
    if hypotheses.model == "logistic":
        fits = [_with_mean(seen, expected_score(e)) for e in (hypotheses.elo0, hypotheses.elo1)]
    else:
        scale = math.sqrt(scores.games) / NORMALISED_ELO
        fits = [_with_t_value(seen, e * scale) for e in (hypotheses.elo0, hypotheses.elo1)]
    total = sum(max(c, _FLOOR) for c in scores.counts)
    one, two = fits
    return float(total * sum(p * math.log(b / a) for (_, p), a, b in zip(seen, one, two, strict=True)))


def _moments(distribution: Sequence[tuple[float, float]]) -> tuple[float, float]:
    mean = sum(v * p for v, p in distribution)
    return mean, sum(p * (v - mean) ** 2 for v, p in distribution)


def _with_mean(seen: Sequence[tuple[float, float]], mean: float) -> list[float]:
    """The likeliest distribution with that mean, given what was seen."""
    return _tilted([p for _, p in seen], [v - mean for v, _ in seen])


def _with_t_value(seen: Sequence[tuple[float, float]], t: float) -> list[float]:
    """The likeliest distribution whose mean lies ``t`` standard deviations above 1/2: a fixed point of `_tilted`."""
    masses = [p for _, p in seen]
    found = [1.0 / len(seen)] * len(seen)
    for _ in range(200):
        mean, variance = _moments([(v, p) for (v, _), p in zip(seen, found, strict=True)])
        sigma = math.sqrt(variance)
        moved = _tilted(masses, [v - 0.5 - t * sigma * (1 + ((mean - v) / sigma) ** 2) / 2 for v, _ in seen])
        change = max(abs(a - b) for a, b in zip(moved, found, strict=True))
        found = moved
        if change < 1e-11:
            break
    return found


def _tilted(masses: Sequence[float], values: Sequence[float]) -> list[float]:
    """``masses`` changed least (in likelihood) so that ``values`` have mean 0: p / (1 + x·value), x the root of a monotone sum."""
    low, high = min(values), max(values)
    if low * high >= 0:
        raise ConfigError("the hypotheses lie outside what the scores can show: choose smaller Elo bounds")
    left, right = -1.0 / high, -1.0 / low
    for _ in range(200):
        x = (left + right) / 2
        total = sum(p * v / (1 + x * v) for p, v in zip(masses, values, strict=True))
        left, right = (x, right) if total > 0 else (left, x)
    x = (left + right) / 2
    return [p / (1 + x * v) for p, v in zip(masses, values, strict=True)]
