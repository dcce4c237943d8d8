"""Exact evaluation inside a run, with a link that answers like known policies."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from typing import Any

import pytest

from selfplay.agent import Message
from selfplay.config import load_config
from selfplay.controller.evaluator import Evaluator, plan_evaluation
from selfplay.errors import ConfigError
from selfplay.types import PolicyVersion, SeatAssignment

SEATS = tuple(SeatAssignment(seat=f"player_{i}", player="llm", agent=f"player_{i}", trained=True) for i in range(2))


class Link:
    """Says each of the two moves with half of ``legal``, in its plain spelling; remembers who was asked."""

    def __init__(self, legal: float = 1.0, bet: float = 0.5) -> None:
        self.masses = {"pass": legal * (1 - bet), "bet": legal * bet}
        self.asked: set[str] = set()

    async def score(
        self, version: PolicyVersion | None, messages: Sequence[Message], answers: Sequence[str], timeout_s: float
    ) -> tuple[float, ...]:
        self.asked.add(str(version))
        return tuple(math.log(self.masses.get(a, 0.0) or 1e-30) for a in answers)


def config(*overrides: str) -> Any:
    return load_config(None, ["env=kuhn-poker-v0", "eval.every=1", *overrides])


def evaluator(link: Any, totals: Sequence[float] = ()) -> Evaluator:
    tree = plan_evaluation(config(), SEATS)
    assert tree is not None
    return Evaluator(tree, SEATS, link, timeout_s=1.0, totals=totals)


def test_uniform_play_has_the_published_value_and_every_agent_is_asked_at_its_version() -> None:
    link = Link()
    found = asyncio.run(evaluator(link).evaluate({"player_0": 3, "player_1": 7}, 1))
    assert found["nash_conv"] == pytest.approx(11 / 12)
    assert found["average_nash_conv"] == pytest.approx(11 / 12)
    assert found["legal_mass"] == pytest.approx(1.0)
    assert link.asked == {"player_0@3", "player_1@7"}


def test_illegal_answers_count_as_played_only() -> None:
    found = asyncio.run(evaluator(Link(legal=0.5)).evaluate({"player_0": 0, "player_1": 0}, 1))
    assert found["nash_conv"] == pytest.approx(11 / 12)
    assert found["nash_conv_as_played"] > 1.0
    assert (found["legal_mass"], found["min_legal_mass"]) == pytest.approx((0.5, 0.5))


def test_the_average_goes_on_from_where_a_checkpoint_left_it() -> None:
    """Always bet (2/3), then always pass with twice the weight; the mixture is neither, and a resumed one is the same."""
    current = {"player_0": 0, "player_1": 0}
    straight = evaluator(link := Link(bet=1.0))
    assert asyncio.run(straight.evaluate(current, 1))["nash_conv"] == pytest.approx(2 / 3)
    totals = straight.totals()
    link.masses = {"pass": 1.0, "bet": 0.0}
    found = asyncio.run(straight.evaluate(current, 2))
    assert found["nash_conv"] == pytest.approx(2.0)
    assert found["average_nash_conv"] < 2.0
    again = asyncio.run(evaluator(link, totals).evaluate(current, 2))
    assert again == pytest.approx(found)


@pytest.mark.parametrize(
    ("overrides", "seats", "words"),
    [
        (["env=debate-v0"], SEATS, "eval.every=1: .*jury"),
        (
            [],
            (SEATS[0], SeatAssignment(seat="player_1", player="random", agent="random")),
            "player_1: random is not one",
        ),
        (
            [],
            (SEATS[0], SeatAssignment(seat="player_1", player="llm", agent="x", options={"history": "last"})),
            "same options",
        ),
    ],
)
def test_what_cannot_be_measured_is_refused(
    overrides: list[str], seats: tuple[SeatAssignment, ...], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        plan_evaluation(config(*overrides), seats)


def test_without_evaluation_no_tree_is_walked() -> None:
    assert plan_evaluation(load_config(None, ["env=tictactoe-v0"]), SEATS) is None
