"""Values, best responses and NashConv of policies on a whole game tree: exact, for any number of seats.

A policy gives, per information state, the probability of each legal move; what is missing to 1 is the probability of making
no legal move at all, which goes where the environment sends it. NashConv is the sum over seats of what a best response would
gain (Lanctot et al., 2017); exploitability of a two-player zero-sum game is half of it.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from selfplay.evaluation.tree import Chance, Choice, GameTree, Node, Terminal

Policy = Sequence[Sequence[float]]
"""[state][move]: probabilities, by index of information state and in the order of its legal moves."""


class Solution(msgspec.Struct, frozen=True, kw_only=True):
    """How a policy does, against itself and against who knows it best. All per seat, in seat order."""

    values: tuple[float, ...]
    """Expected reward when every seat plays the policy."""
    best_response: tuple[float, ...]
    """The most a seat can get while the others play the policy."""

    @property
    def gains(self) -> tuple[float, ...]:
        """What each seat's best response gains; never negative but for rounding."""
        return tuple(b - v for b, v in zip(self.best_response, self.values, strict=True))

    @property
    def nash_conv(self) -> float:
        return sum(self.gains)

    @property
    def exploitability(self) -> float:
        """NashConv per seat."""
        return self.nash_conv / len(self.values)


def uniform_policy(tree: GameTree) -> list[list[float]]:
    """Every legal move equally likely."""
    return [[1.0 / len(s.moves)] * len(s.moves) for s in tree.states]


def solve(tree: GameTree, policy: Policy) -> Solution:
    """Exact values and best responses; raises ValueError for a policy that does not fit the tree."""
    check_policy(tree, policy)
    responses = [best_response_value(tree, policy, seat) for seat in range(len(tree.seats))]
    return Solution(values=values(tree, policy), best_response=tuple(responses))


def check_policy(tree: GameTree, policy: Policy) -> None:
    """Raise ValueError unless ``policy`` has one probability per legal move of each state, summing to at most 1."""
    if len(policy) != len(tree.states):
        raise ValueError(f"a policy for {len(policy)} information states; {tree.env_id} has {len(tree.states)}")
    for state, row in zip(tree.states, policy, strict=True):
        if len(row) != len(state.moves) or not all(p >= 0 for p in row) or not sum(row) <= 1 + 1e-6:
            raise ValueError(f"probabilities {list(row)} do not fit the moves {state.moves} of {state.decision.view!r}")


def values(tree: GameTree, policy: Policy) -> tuple[float, ...]:
    """Expected reward per seat when all follow ``policy``."""
    total = [0.0] * len(tree.seats)
    stack: list[tuple[float, Node]] = [(1.0, tree.root)]
    while stack:
        reach, node = stack.pop()
        if isinstance(node, Terminal):
            for i, r in enumerate(node.rewards):
                total[i] += reach * r
        elif isinstance(node, Chance):
            stack += [(reach * p, child) for p, child in node.branches]
        else:
            row = policy[node.state]
            stack += [(reach * p, child) for p, child in zip(row, node.children, strict=True) if p > 0.0]
            if (rest := 1.0 - sum(row)) > 1e-12:
                stack.append((reach * rest, node.illegal))
    return tuple(total)


def reach_probabilities(tree: GameTree, policy: Policy) -> list[float]:
    """Probability that each information state is met when all follow ``policy``."""
    out = [0.0] * len(tree.states)
    stack: list[tuple[float, Node]] = [(1.0, tree.root)]
    while stack:
        reach, node = stack.pop()
        if isinstance(node, Chance):
            stack += [(reach * p, child) for p, child in node.branches]
        elif isinstance(node, Choice):
            out[node.state] += reach
            stack += [(reach * p, c) for p, c in zip(policy[node.state], node.children, strict=True) if p > 0.0]
            if (rest := 1.0 - sum(policy[node.state])) > 1e-12:
                stack.append((reach * rest, node.illegal))
    return out


def best_response_value(tree: GameTree, policy: Policy, seat: int) -> float:
    """The most ``seat`` can get while the others follow ``policy`` (it always makes legal moves)."""
    return _Responder(tree, policy, seat).value(tree.root)


class _Responder:
    """One seat's best response, found state by state from whatever is asked for first; each is decided once."""

    def __init__(self, tree: GameTree, policy: Policy, seat: int) -> None:
        self._tree, self._policy, self._seat = tree, policy, seat
        self._members: dict[int, list[tuple[float, Choice]]] = {}
        self._best: dict[int, int] = {}
        self._values: dict[int, float] = {}
        self._collect()

    def _collect(self) -> None:
        """The decisions of each of the seat's information states, with how likely chance and the others lead there."""
        stack: list[tuple[float, Node]] = [(1.0, self._tree.root)]
        while stack:
            reach, node = stack.pop()
            if isinstance(node, Terminal):
                continue
            if isinstance(node, Chance):
                stack += [(reach * p, child) for p, child in node.branches]
            elif self._tree.states[node.state].seat == self._seat:
                self._members.setdefault(node.state, []).append((reach, node))
                stack += [(reach, child) for child in node.children]
            else:
                stack += [(reach * p, child) for p, child in self._others(node)]

    def _others(self, node: Choice) -> list[tuple[float, Node]]:
        row = self._policy[node.state]
        branches = list(zip(row, node.children, strict=True))
        if (rest := 1.0 - sum(row)) > 1e-12:
            branches.append((rest, node.illegal))
        return branches

    def value(self, node: Node) -> float:
        """The seat's reward below ``node`` under its best response."""
        if isinstance(node, Terminal):
            return node.rewards[self._seat]
        known = self._values.get(id(node))
        if known is None:
            known = self._values[id(node)] = self._compute(node)
        return known

    def _compute(self, node: Chance | Choice) -> float:
        if isinstance(node, Chance):
            return sum(p * self.value(child) for p, child in node.branches)
        if self._tree.states[node.state].seat == self._seat:
            return self.value(node.children[self._best_move(node.state)])
        return sum(p * self.value(child) for p, child in self._others(node))

    def _best_move(self, state: int) -> int:
        if state not in self._best:
            worth = [
                sum(reach * self.value(node.children[move]) for reach, node in self._members[state])
                for move in range(len(self._tree.states[state].moves))
            ]
            self._best[state] = worth.index(max(worth))
        return self._best[state]
