"""The average policy against figures worked out by hand, and against the published value of the uniform policy."""

from __future__ import annotations

import pytest

from selfplay.evaluation import build_tree, solve, uniform_policy
from selfplay.evaluation.average import PolicyAverage, own_reach

TREE = build_tree("kuhn-poker-v0")
PASS, BET = 0, 1


def always(move: int) -> list[list[float]]:
    return [[float(i == move) for i in range(2)] for _ in TREE.states]


def second_decisions() -> list[int]:
    return [s.index for s in TREE.states if s.past]


def test_one_policy_is_its_own_average() -> None:
    average = PolicyAverage(TREE)
    average.add(uniform_policy(TREE), 3.0)
    assert solve(TREE, average.policy()).nash_conv == pytest.approx(11 / 12)


def test_own_reach_is_the_seats_own_doing() -> None:
    """The first seat decides again only after its own pass: always when it passes, half when it tosses a coin."""
    states = second_decisions()
    assert len(states) == 3
    for policy, wanted in ((always(PASS), 1.0), (always(BET), 0.0), (uniform_policy(TREE), 0.5)):
        reach = own_reach(TREE, policy)
        assert {reach[i] for i in states} == {wanted}
        assert {r for i, r in enumerate(reach) if i not in states} == {1.0}


def test_a_policy_counts_by_how_it_gets_there() -> None:
    """Pass always, and bet always, equally often: a first decision is even; after an own pass only the passer is there."""
    average = PolicyAverage(TREE)
    average.add(always(PASS))
    average.add(always(BET))
    rows = average.policy()
    assert all(rows[i] == [1.0, 0.0] for i in second_decisions())
    assert all(row == [0.5, 0.5] for i, row in enumerate(rows) if i not in second_decisions())


def test_weights_and_going_on_from_totals() -> None:
    average = PolicyAverage(TREE)
    average.add(always(PASS), 3.0)
    again = PolicyAverage(TREE, average.totals())
    again.add(always(BET), 1.0)
    assert again.policy()[0] == [0.75, 0.25]
    with pytest.raises(ValueError, match="do not fit the 12 states"):
        PolicyAverage(TREE, (1.0, 2.0))


def test_a_state_that_nobody_comes_to_is_uniform() -> None:
    average = PolicyAverage(TREE)
    average.add(always(BET))
    assert all(average.policy()[i] == [0.5, 0.5] for i in second_decisions())
