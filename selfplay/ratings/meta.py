"""The game of choosing a player: Nash averaging, alpha-rank, and how much of a record is a cycle.

In: a payoff matrix between players. Out: weights that no clone and no weak opponent can change (Balduzzi et al., 2018), where
evolution spends its time (Omidshafiei et al., 2019), and the share of the record that no ranking can explain.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

Matrix = Sequence[Sequence[float]]


def nash_average(payoffs: Matrix) -> list[float]:
    """Weights of the symmetric zero-sum game ``payoffs`` [n][n] (antisymmetric): its Nash equilibrium of largest entropy.

    Raises ValueError for a matrix that is not antisymmetric.
    """
    import numpy as np
    from scipy import optimize

    a = _antisymmetric(payoffs)
    n = len(a)
    if n == 1:
        return [1.0]
    limits = {"A_ub": a, "b_ub": np.full(n, 1e-9), "A_eq": np.ones((1, n)), "b_eq": [1.0], "method": "highs"}
    corners = [optimize.linprog(-np.eye(n)[i], bounds=[(0, 1)] * n, **limits).x for i in range(n)]
    start = np.mean(corners, axis=0)
    support = np.flatnonzero(start > 1e-7)
    if len(support) == 1 or np.ptp(corners, axis=0).max() < 1e-7:
        return [float(x) for x in start / start.sum()]
    return _spread_most(a, support, start)


def _spread_most(a: Any, support: Any, start: Any) -> list[float]:
    """The point of largest entropy among the equilibria, which fill a polytope with ``start`` inside."""
    import numpy as np
    from scipy import optimize

    columns = a[:, support]

    def minus_entropy(p: Any) -> float:
        safe = np.clip(p, 1e-12, None)
        return float((safe * np.log(safe)).sum())

    found = optimize.minimize(
        minus_entropy, start[support], jac=lambda p: np.log(np.clip(p, 1e-12, None)) + 1, method="SLSQP",
        bounds=[(0, 1)] * len(support), options={"ftol": 1e-14, "maxiter": 500},
        constraints=[
            {"type": "eq", "fun": lambda p: p.sum() - 1, "jac": lambda p: np.ones_like(p)},
            {"type": "ineq", "fun": lambda p: 1e-9 - columns @ p, "jac": lambda _: -columns},
        ],
    )  # fmt: skip
    out = np.zeros(len(a))
    out[support] = np.clip(found.x, 0, None)
    return [float(x) for x in out / out.sum()]


def cyclic_share(payoffs: Matrix) -> float:
    """Share of the squared payoffs that no rating explains: 0 for a ladder of ratings, 1 for rock-paper-scissors.

    The rating part of an antisymmetric matrix is the difference of its row means (a Hodge decomposition). An all-zero matrix
    has no cycle.
    """

    a = _antisymmetric(payoffs)
    total = float((a * a).sum())
    if not total:
        return 0.0
    means = a.mean(axis=1)
    rest = a - (means[:, None] - means[None, :])
    return float((rest * rest).sum()) / total


def alpha_rank(payoffs: Matrix, *, alpha: float = math.inf, population: int = 50) -> list[float]:
    """Stationary distribution over strategies of one population of ``population`` players of a symmetric game.

    ``payoffs`` [n][n]: what the row strategy gets against the column one. ``alpha``: how strongly selection favours the fitter;
    infinite: a strategy takes over exactly when it is better (equals drift).
    """
    import numpy as np

    table = np.asarray(payoffs, float)
    n = len(table)
    if table.shape != (n, n) or not np.isfinite(table).all():
        raise ValueError(f"payoffs of shape {table.shape}; alpha-rank needs a square table of finite numbers")
    if n == 1:
        return [1.0]
    chain = np.zeros((n, n))
    for i in range(n):
        for j in range(n):
            if i != j:
                chain[i, j] = _takes_over(table, j, i, alpha, population) / (n - 1)
        chain[i, i] = 1.0 - chain[i].sum()
    return _stationary(chain)


def _takes_over(table: Any, mutant: int, resident: int, alpha: float, m: int) -> float:
    """Probability that one ``mutant`` among ``resident`` ends up as everybody (a Moran process with Fermi selection)."""
    if math.isinf(alpha):
        gain = table[mutant, resident] - table[resident, mutant]
        tiny = 1e-12 * max(1.0, abs(table).max())
        return 1.0 - 1e-12 if gain > tiny else 1.0 / m if abs(gain) <= tiny else 1e-12
    total, exponent = 1.0, 0.0
    for k in range(1, m):
        mine = ((k - 1) * table[mutant, mutant] + (m - k) * table[mutant, resident]) / (m - 1)
        theirs = (k * table[resident, mutant] + (m - k - 1) * table[resident, resident]) / (m - 1)
        exponent -= alpha * (mine - theirs)
        total += math.exp(min(700.0, exponent))
    return 1.0 / total


def _stationary(chain: Any) -> list[float]:
    import numpy as np

    n = len(chain)
    system = np.vstack([chain.T - np.eye(n), np.ones(n)])
    found = np.linalg.lstsq(system, np.r_[np.zeros(n), 1.0], rcond=None)[0]
    found = np.clip(found, 0, None)
    return [float(x) for x in found / found.sum()]


def _antisymmetric(payoffs: Matrix) -> Any:
    import numpy as np

    a = np.asarray(payoffs, float)
    if a.ndim != 2 or a.shape[0] != a.shape[1] or not np.allclose(a, -a.T, atol=1e-9):
        raise ValueError(
            "payoffs must be a square antisymmetric matrix of finite numbers: what one wins the other loses"
        )
    return a
