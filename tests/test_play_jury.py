"""The jury in the loop: asked once, in both orders, its answers checked; API and policy failures are no verdicts."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from selfplay.environment import JuryQuestion, Outcome
from selfplay.errors import EngineError, EnvironmentFault, UserError
from selfplay.play import FixedJury
from selfplay.play.chat_api import TopLogprob
from selfplay.play.jury import label_masses
from selfplay.types import Limits
from toy_games import Scripted, Turns, play_toy

QUESTION = JuryQuestion(system="s", prompt="who?", lead="It is ", labels=("A", "B"))


class Judged(Turns):
    """One question; seat a's reward is the mass of A minus that of B."""

    question: Any = QUESTION

    def __init__(self) -> None:
        super().__init__(random.Random(0), length=2)
        self.heard: list[Mapping[str, float]] = []

    def jury_questions(self) -> Sequence[JuryQuestion]:
        return (self.question,)

    def hear_jury(self, answers: Sequence[Mapping[str, float]]) -> None:
        self.heard += answers

    def outcome(self) -> Outcome:
        a = self.heard[0]["A"] - self.heard[0]["B"]
        return Outcome(rewards={"a": a, "b": -a})


class Answers:
    """A jury that gives one fixed mapping, or raises."""

    name = "test juror"

    def __init__(self, answer: Any) -> None:
        self.answer, self.asked = answer, 0

    async def judge(self, question: JuryQuestion) -> Mapping[str, float]:
        self.asked += 1
        await asyncio.sleep(0)
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer  # type: ignore[no-any-return]


def players() -> dict[str, Scripted]:
    return {"a": Scripted("x"), "b": Scripted("x")}


def test_question_and_answer_are_recorded() -> None:
    episode = play_toy(Judged(), players(), jury=Answers({"A": 0.75, "B": 0.25}))
    (record,) = episode.jury
    assert (record.question, record.labels, record.probabilities, record.juror) == (
        "who?",
        ("A", "B"),
        (0.75, 0.25),
        "test juror",
    )
    assert episode.rewards == {"a": 0.5, "b": -0.5}


def test_masses_are_scaled_to_one() -> None:
    game = Judged()
    play_toy(game, players(), jury=Answers({"A": 0.3, "B": 0.1}))
    assert game.heard == [{"A": pytest.approx(0.75), "B": pytest.approx(0.25)}]


@pytest.mark.parametrize(
    "answer",
    [
        {},
        {"A": 1.0},
        {"A": float("nan"), "B": 1.0},
        {"A": -1.0, "B": 2.0},
        {"A": 0.0, "B": 0.0},
        {"A": float("inf"), "B": 1},
    ],
)
def test_an_answer_that_is_none_is_an_engine_failure(answer: Any) -> None:
    table = players()
    with pytest.raises(EngineError, match="jury test juror answered"):
        play_toy(Judged(), table, jury=Answers(answer))
    assert [p.closed for p in table.values()] == [1, 1]


def test_a_failing_jury_is_no_result() -> None:
    with pytest.raises(EngineError, match="jury is down"):
        play_toy(Judged(), players(), jury=Answers(EngineError("jury is down")))


def test_a_missing_jury_is_told() -> None:
    with pytest.raises(UserError, match="toy-v0 needs a jury"):
        play_toy(Judged(), players())


def test_a_jury_is_not_asked_about_games_that_did_not_end() -> None:
    jury = Answers({"A": 1.0, "B": 0.0})
    forfeit = play_toy(Judged(), {"a": Scripted("rubbish"), "b": Scripted("x")}, jury=jury)
    cut = play_toy(Judged(), players(), jury=jury, limits=Limits(max_turns=1))
    assert (forfeit.ended, cut.ended, jury.asked) == ("forfeit", "truncated", 0)


@pytest.mark.parametrize("labels", [("A",), ("A", "A"), ()])
def test_a_question_without_a_choice_is_the_environments_fault(labels: tuple[str, ...]) -> None:
    game = Judged()
    game.question = JuryQuestion(system="", prompt="", lead="", labels=labels)
    with pytest.raises(EnvironmentFault, match="two different labels"):
        play_toy(game, players(), jury=FixedJury())


def test_label_masses_take_spaces_and_case_and_ignore_the_rest() -> None:
    tokens = [
        TopLogprob(" A", -1.0),
        TopLogprob("a", -2.0),
        TopLogprob("B", -3.0),
        TopLogprob("Alpha", -0.1),
        TopLogprob("B", float("nan")),
    ]
    masses = label_masses(("A", "B"), tokens)
    assert masses["A"] == pytest.approx(0.367879 + 0.135335, abs=1e-5)
    assert masses["B"] == pytest.approx(0.049787, abs=1e-5)


@given(st.lists(st.tuples(st.text(max_size=3), st.floats())))
def test_any_alternatives_give_finite_masses(pairs: list[tuple[str, float]]) -> None:
    masses = label_masses(("A", "B"), [TopLogprob(t, p) for t, p in pairs])
    assert all(0.0 <= m <= len(pairs) for m in masses.values())
