"""Counterfactual regret minimisation (CFR+; Tammelin, 2014) on a whole game tree: a near-equilibrium of any small game.

In: a `GameTree`. Out: the average policy. For two players and zero sum its NashConv goes to 0; for more it is a strong opponent
without a guarantee.
"""

from __future__ import annotations

from selfplay.evaluation.tree import Chance, Choice, GameTree, Node, Terminal


def cfr_plus(tree: GameTree, iterations: int = 500) -> list[list[float]]:
    """Average policy [state][move] after ``iterations``, each of which updates one seat after the other."""
    solver = _Solver(tree)
    for t in range(1, iterations + 1):
        for seat in range(len(tree.seats)):
            solver.update(seat, weight=float(t))
    return solver.average()


class _Solver:
    def __init__(self, tree: GameTree) -> None:
        self._tree = tree
        self._regret = [[0.0] * len(s.moves) for s in tree.states]
        self._sum = [[0.0] * len(s.moves) for s in tree.states]

    def update(self, seat: int, *, weight: float) -> None:
        """One pass for ``seat``; the others keep their present policies."""
        policy = [_matched(r) for r in self._regret]
        change = [[0.0] * len(r) for r in self._regret]
        self._walk(self._tree.root, seat, policy, change, 1.0, 1.0, weight)
        for state, row in zip(self._tree.states, change, strict=True):
            if state.seat == seat:
                regret = self._regret[state.index]
                self._regret[state.index] = [max(0.0, a + b) for a, b in zip(regret, row, strict=True)]

    def average(self) -> list[list[float]]:
        """Policies over all iterations, weighted by time and by how likely the seat itself gets there."""
        return [[x / sum(row) for x in row] if sum(row) > 0 else [1.0 / len(row)] * len(row) for row in self._sum]

    def _walk(
        self,
        node: Node,
        seat: int,
        policy: list[list[float]],
        change: list[list[float]],
        own: float,
        others: float,
        weight: float,
    ) -> float:
        """The seat's value below ``node``; ``own`` and ``others``: how likely the seat and all else lead here."""
        if isinstance(node, Terminal):
            return node.rewards[seat]
        if isinstance(node, Chance):
            return sum(p * self._walk(c, seat, policy, change, own, others * p, weight) for p, c in node.branches)
        row = policy[node.state]
        if self._tree.states[node.state].seat != seat:
            return sum(
                p * self._walk(c, seat, policy, change, own, others * p, weight)
                for p, c in zip(row, node.children, strict=True)
                if p > 0.0
            )
        return self._own(node, row, seat, policy, change, own, others, weight)

    def _own(
        self,
        node: Choice,
        row: list[float],
        seat: int,
        policy: list[list[float]],
        change: list[list[float]],
        own: float,
        others: float,
        weight: float,
    ) -> float:
        worth = [
            self._walk(c, seat, policy, change, own * p, others, weight)
            for p, c in zip(row, node.children, strict=True)
        ]
        value = sum(p * w for p, w in zip(row, worth, strict=True))
        for move, w in enumerate(worth):
            change[node.state][move] += others * (w - value)
            self._sum[node.state][move] += weight * own * row[move]
        return value


def _matched(regret: list[float]) -> list[float]:
    total = sum(regret)
    return [r / total for r in regret] if total > 0 else [1.0 / len(regret)] * len(regret)
