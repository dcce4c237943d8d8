"""The average of many policies of one game: a mixture that plays one of them per game, as one policy of the whole tree.

In a two-player zero-sum game it is the average of self-play that comes near equilibrium, while the last iterate may circle
around it (fictitious play: Brown 1951; sequence form: Heinrich et al. 2015). A policy's share in a state goes by how likely its
own moves lead there.
"""

from __future__ import annotations

from collections.abc import Sequence

from selfplay.evaluation.solve import Policy, check_policy
from selfplay.evaluation.tree import Chance, Choice, GameTree, Node


class PolicyAverage:
    """Running totals, per state and move."""

    def __init__(self, tree: GameTree, totals: Sequence[float] = ()) -> None:
        """``totals`` goes on from an earlier `totals`; raises ValueError when they are of another tree."""
        self._tree = tree
        self._totals = [[0.0] * len(s.moves) for s in tree.states]
        if totals:
            self._restore(totals)

    def add(self, policy: Policy, weight: float = 1.0) -> None:
        """Mix in a policy whose rows sum to 1."""
        check_policy(self._tree, policy)
        for total, row, reach in zip(self._totals, policy, own_reach(self._tree, policy), strict=True):
            for i, p in enumerate(row):
                total[i] += weight * reach * p

    def policy(self) -> list[list[float]]:
        """The mixture; uniform in states that none of its policies comes to by itself."""
        return [[t / sum(row) for t in row] if sum(row) > 0 else [1.0 / len(row)] * len(row) for row in self._totals]

    def totals(self) -> tuple[float, ...]:
        """What the constructor needs to go on."""
        return tuple(t for row in self._totals for t in row)

    def _restore(self, totals: Sequence[float]) -> None:
        if len(totals) != sum(map(len, self._totals)):
            raise ValueError(
                f"{len(totals)} totals do not fit the {len(self._tree.states)} states of {self._tree.env_id}"
            )
        left = iter(totals)
        self._totals = [[next(left) for _ in row] for row in self._totals]


def own_reach(tree: GameTree, policy: Policy) -> list[float]:
    """For each information state, how likely the seat's own earlier moves are, if all others lead there."""
    out = [0.0] * len(tree.states)
    ones = (1.0,) * len(tree.seats)
    stack: list[tuple[tuple[float, ...], Node]] = [(ones, tree.root)]
    while stack:
        reach, node = stack.pop()
        if isinstance(node, Chance):
            stack += [(reach, child) for _, child in node.branches]
        elif isinstance(node, Choice):
            seat = tree.states[node.state].seat
            out[node.state] = reach[seat]
            for p, child in zip(policy[node.state], node.children, strict=True):
                stack.append(((*reach[:seat], reach[seat] * p, *reach[seat + 1 :]), child))
    return out
