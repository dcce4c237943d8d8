"""Maximum likelihood for a `Design`: Newton's method, whether a maximum exists, and covariances.

Intervals come from a sandwich that takes the clusters (pairs of games on the same deal) as what is independent, with the factor
G/(G−1). Records that are *separated* (somebody always won) have no finite maximum: they are found by Newton's failure and
proven by a linear program (Albert and Anderson, 1984), then fitted under a weak prior, and said to be so. Their likelihood is far from
a parabola (Hauck and Donner, 1977: the surer the winner, the wider the interval), so theirs come from the likelihood's profile.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from selfplay.ratings.design import Columns, Design

PRIOR = 0.1
"""Weight of the prior where one is needed: each log strength ~ N(0, 1/0.1)."""
_FAR = 9.0
"""Log strengths beyond this (1 : 8000) are taken to run away."""
_STEPS = 60


@dataclass(frozen=True)
class Fit:
    """The estimate and its covariance; ``separated`` says that a weak prior holds it, ``free`` which columns run away."""

    estimate: Any
    """[P]."""
    covariance: Any
    """[P, P]."""
    degrees: float
    """Degrees of freedom of the t quantile."""
    separated: bool
    free: tuple[int, ...]
    degenerate: bool
    """No cluster differed from what was expected of it, so the sandwich is empty: the covariance is the model's."""
    confounded: tuple[int, ...]
    """Columns that the games cannot tell apart from others: held near 0 by the prior."""


def fit(design: Design, weights: Any = None, start: Any = None) -> Fit:
    """Estimate all parameters. ``weights`` [G]: how often each cluster counts (for a bootstrap)."""
    import numpy as np

    num = design.columns.num
    counts = np.asarray(design.taken.sum(axis=0) if weights is None else weights @ design.taken).ravel()
    problem = _Problem(design, counts)
    confounded = problem.confounded() if weights is None else ()
    penalty = np.zeros((num, num))
    penalty[list(confounded), list(confounded)] = PRIOR
    found, settled = problem.newton(np.zeros(num) if start is None else start, penalty)
    free: tuple[int, ...] = ()
    if not settled and not (free := problem.running_away()):
        found, settled = problem.newton(found, penalty, far=math.inf)  # large, but finite
    if not settled:
        penalty = _prior(design.columns)
        found, _ = problem.newton(np.zeros(num), penalty)
    information = problem.information(found) + penalty
    bread = np.linalg.pinv(information, hermitian=True) if num else np.zeros((0, 0))
    num_clusters = int(design.taken.shape[0])
    covariance, degenerate = bread, False
    if settled and num_clusters > 1 and num:
        covariance = _sandwich(design, problem.probabilities(found), bread)
        empty = {c for c in range(num) if covariance[c, c] < 1e-9 * bread[c, c]}
        if degenerate := any(c in empty for c in design.columns.player_column):
            covariance = bread
        else:  # nothing about a seat or a tie varied, which does not make it certain
            covariance[sorted(empty), sorted(empty)] = np.diag(bread)[sorted(empty)]
    return Fit(found, covariance, max(1.0, num_clusters - 1.0), not settled, free, degenerate, confounded)


class Profile:
    """Intervals of a separated fit. A pair counts as one observation, so that what its games share is not counted twice."""

    def __init__(self, design: Design, found: Fit, quantile: float) -> None:
        import numpy as np

        counts = np.asarray(design.taken.sum(axis=0)).ravel()
        self._problem, self._penalty, self._best = _Problem(design, counts), _prior(design.columns), found.estimate
        self._share = design.taken.shape[0] / max(1.0, float(counts.sum()))
        self._most = quantile**2
        self._peak = self._problem.value(self._best, self._penalty)

    def interval(self, contrast: Any) -> tuple[float, float]:
        """Where the deviance of ``contrast`` [P] reaches the quantile, below and above the estimate."""
        return self._end(contrast, -1.0), self._end(contrast, 1.0)

    def excludes(self, contrast: Any, target: float) -> bool:
        """Whether ``target`` lies outside of the interval."""
        return self._excess(contrast, target) > 0

    def _excess(self, contrast: Any, target: float) -> float:
        import numpy as np

        norm = float(contrast @ contrast)
        start = self._best + contrast * (target - float(contrast @ self._best)) / norm
        basis = np.linalg.svd(contrast[None, :])[2][1:].T
        at, _ = self._problem.newton(start, self._penalty, basis=basis)
        return float(2 * (self._peak - self._problem.value(at, self._penalty)) * self._share - self._most)

    def _end(self, contrast: Any, side: float) -> float:
        from scipy import optimize

        if not contrast.any():
            return 0.0
        middle, width = float(contrast @ self._best), 1.0
        while self._excess(contrast, middle + side * width) < 0:
            width *= 2.0
        return float(
            optimize.brentq(lambda x: self._excess(contrast, middle + side * x), 0.0, width, xtol=1e-3, rtol=1e-6)
            * side
            + middle
        )


def _prior(columns: Columns) -> Any:
    """[P, P]: pulls each player to the mean of its group, seat effects and ties to none; the same whoever the reference is."""
    import numpy as np

    out = np.zeros((columns.num, columns.num))
    for column in (*(c for c in columns.seat_column if c is not None), *columns.tie_column):
        out[column, column] = PRIOR
    for group in set(columns.group):
        members = [c for c, g in zip(columns.player_column, columns.group, strict=True) if g == group]
        select = np.zeros((len(members), columns.num))
        for i, member in enumerate(members):
            if member is not None:
                select[i, member] = 1.0
        centre = np.eye(len(members)) - 1.0 / len(members)
        out += PRIOR * select.T @ centre @ select
    return out


def _sandwich(design: Design, p: Any, bread: Any) -> Any:
    """G/(G−1) · bread · Σ_g s_g s_gᵀ · bread, with s_g the score of cluster g."""
    residual = design.rows - _mean_rows(design, p)[design.choice]
    scores = design.taken @ residual
    meat = _dense(scores.T @ scores)
    num = design.taken.shape[0]
    return bread @ meat @ bread * (num / (num - 1.0))


def _mean_rows(design: Design, p: Any) -> Any:
    """[C, P]: the expected row of each choice."""
    import numpy as np
    from scipy import sparse

    num_rows = len(design.choice)
    if isinstance(design.rows, np.ndarray):
        return np.add.reduceat(design.rows * p[:, None], design.starts)
    gather = sparse.csr_array((p, (design.choice, np.arange(num_rows))), shape=(int(design.choice[-1]) + 1, num_rows))
    return gather @ design.rows


def _dense(matrix: Any) -> Any:
    return matrix.toarray() if hasattr(matrix, "toarray") else matrix


class _Problem:
    """The likelihood of counts [A]."""

    def __init__(self, design: Design, counts: Any) -> None:
        import numpy as np

        self._design, self._counts = design, counts
        self._starts = design.starts
        self._totals = np.add.reduceat(counts, self._starts) if len(self._starts) else np.zeros(0)

    def probabilities(self, parameters: Any) -> Any:
        """[A] of each alternative within its choice."""
        import numpy as np

        worth = self._design.rows @ parameters
        top = np.maximum.reduceat(worth, self._starts)
        e = np.exp(worth - top[self._design.choice])
        return e / np.add.reduceat(e, self._starts)[self._design.choice]

    def information(self, parameters: Any) -> Any:
        """[P, P]: minus the second derivative of the log likelihood."""
        import numpy as np

        if not len(self._starts):
            return np.zeros((self._design.columns.num,) * 2)
        p, rows = self.probabilities(parameters), self._design.rows
        n = self._totals[self._design.choice]
        mean = _mean_rows(self._design, p)
        return _dense((rows.T * (n * p)) @ rows - (mean.T * self._totals) @ mean)

    def newton(self, start: Any, penalty: Any, far: float = _FAR, basis: Any = None) -> tuple[Any, bool]:
        """(estimate, whether a finite maximum was reached); with ``basis`` [P, B] moving along its columns alone."""
        import numpy as np

        at = np.array(start, float)
        if not len(self._starts) or not len(at):
            return at, True
        value = self.value(at, penalty)
        for _ in range(_STEPS):
            p = self.probabilities(at)
            slope = self._design.rows.T @ (self._counts - self._totals[self._design.choice] * p) - penalty @ at
            curve = self.information(at) + penalty + 1e-10 * np.eye(len(at))
            if basis is None:
                step = np.linalg.solve(curve, slope)
            else:
                step = basis @ np.linalg.solve(basis.T @ curve @ basis, basis.T @ slope)
            length, rounding = 1.0, 1e-12 * (1.0 + abs(value))
            while length > 1e-8 and not (further := self.value(at + length * step, penalty)) >= value - rounding:
                length /= 2.0
            at, value = at + length * step, further
            if np.abs(at).max() > far and not penalty.any():
                return at, False
            if np.abs(step).max() < 1e-10:
                return at, True
        return at, bool(np.abs(step).max() < 1e-6)

    def value(self, at: Any, penalty: Any) -> float:
        """Log likelihood less the penalty."""
        import numpy as np

        worth = self._design.rows @ at
        top = np.maximum.reduceat(worth, self._starts)
        total = np.log(np.add.reduceat(np.exp(worth - top[self._design.choice]), self._starts)) + top
        return float(self._counts @ worth - self._totals @ total - 0.5 * at @ penalty @ at)

    def confounded(self) -> tuple[int, ...]:
        """Columns without which the rest determines as much: the last ones first, so seats and ties before players."""
        import numpy as np

        information = self.information(np.zeros(self._design.columns.num))
        scale = max(1.0, float(np.abs(information).max(initial=0.0))) * 1e-9
        if np.linalg.matrix_rank(information, tol=scale, hermitian=True) == len(information):
            return ()
        kept: list[int] = []
        rank = 0
        for column in range(len(information)):
            trial = [*kept, column]
            found = int(np.linalg.matrix_rank(information[np.ix_(trial, trial)], tol=scale, hermitian=True))
            if found > rank:
                kept, rank = trial, found
        return tuple(c for c in range(len(information)) if c not in kept)

    def running_away(self) -> tuple[int, ...]:
        """Columns along which the likelihood rises for ever; empty when a maximum exists after all."""
        import numpy as np
        from scipy import optimize, sparse

        taken = np.flatnonzero(self._counts > 0)
        pairs = self._pairs(taken)
        rows = self._design.rows
        ahead = sparse.csr_array(rows[[a for a, _ in pairs]] - rows[[b for _, b in pairs]])
        total = np.asarray(ahead.sum(axis=0)).ravel()
        found = optimize.linprog(
            -total, A_ub=-ahead, b_ub=np.zeros(ahead.shape[0]), bounds=[(-1.0, 1.0)] * len(total), method="highs"
        )
        if found.status != 0 or -found.fun < 1e-7:
            return ()
        return tuple(int(c) for c in np.flatnonzero(np.abs(found.x) > 1e-7))

    def _pairs(self, taken: Any) -> list[tuple[int, int]]:
        """(taken alternative, another of its choice)."""
        ends = [*map(int, self._starts[1:]), len(self._design.choice)]
        out = []
        for a in map(int, taken):
            c = int(self._design.choice[a])
            out += [(a, b) for b in range(int(self._starts[c]), ends[c]) if b != a]
        return out
