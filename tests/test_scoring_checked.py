"""What a user's own algorithm gets wrong ends as one line that says whose fault it is and where."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest

from episode_samples import episode
from selfplay.config.schema import AlgorithmConfig
from selfplay.errors import RunError, UserError
from selfplay.registry import ALGORITHMS, Entry
from selfplay.scoring import algorithms, load_algorithm
from selfplay.scoring.checked import CheckedAlgorithm
from selfplay.types import Episode

GOOD = {"pro": 1.0, "con": -1.0}


def checked(
    advantages: Any = None, state: Any = None, load: Callable[[Any], None] = lambda _: None
) -> CheckedAlgorithm:
    def given(episodes: list[Episode]) -> Any:
        return advantages(episodes) if callable(advantages) else advantages

    return CheckedAlgorithm(
        SimpleNamespace(advantages=given, state=lambda: state, load_state=load),
        "algorithm 'mine' of mine 1 (mine:Mine)",
    )


def test_what_fits_passes_as_it_is() -> None:
    assert checked([GOOD]).advantages([episode()]) == [GOOD]
    turns = sum(t.seat == "pro" for t in episode().turns)
    per_turn = {"pro": [0.5] * turns, "con": 1}
    assert checked([per_turn]).advantages([episode()]) == [per_turn]
    assert checked(state={"n": 2}).state() == {"n": 2.0}


def test_arrays_are_taken_as_the_numbers_they_hold() -> None:
    turns = sum(t.seat == "pro" for t in episode().turns)
    found = checked([{"pro": np.full(turns, 0.5, np.float32), "con": np.float32(-1)}]).advantages([episode()])
    assert found == [{"pro": [0.5] * turns, "con": -1.0}]
    assert type(found[0]["con"]) is float


@pytest.mark.parametrize(
    ("advantages", "told"),
    [
        ([], "gave 0 mappings for 1 episodes"),
        ([GOOD, GOOD], "gave 2 mappings for 1 episodes"),
        ([{"con": 1.0}], r"left out the trained seat 'pro' of "),
        ([GOOD | {"pro": float("nan")}], r"seat 'pro' of .* is nan, which is no finite number"),
        ([GOOD | {"pro": [1.0] * 99}], r"is 99 numbers for \d turns"),
        ([GOOD | {"pro": "1"}], "is a str, neither a number nor one per turn"),
        ([GOOD | {"pro": None}], "is a NoneType, neither"),
        (None, r"advantages raised TypeError: .* \(.*checked\.py:\d+\)"),
        (lambda _: 1 / 0, r"advantages raised ZeroDivisionError: .* \(.*test_scoring_checked\.py:\d+\)"),
    ],
)
def test_advantages_that_do_not_fit_are_told_in_one_line(advantages: Any, told: str) -> None:
    with pytest.raises(RunError, match=rf"^algorithm 'mine' of mine 1 \(mine:Mine\): .*{told}") as caught:
        checked(advantages).advantages([episode()])
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("state", [{"x": object()}, {"x": "text"}, ["x"], None])
def test_a_state_that_no_checkpoint_can_hold_is_told(state: Any) -> None:
    with pytest.raises(RunError, match="state raised"):
        checked(state=state).state()


def test_a_state_that_the_algorithm_cannot_read_is_told() -> None:
    with pytest.raises(RunError, match="load_state raised KeyError: 'n'"):
        checked(load=lambda state: state["n"]).load_state({"m": 1.0})


def test_what_the_project_says_itself_is_passed_on() -> None:
    def refuse(_: Any) -> None:
        raise UserError("group is too small")

    with pytest.raises(UserError, match=r"^group is too small$"):
        checked(refuse).advantages([episode()])


def test_an_algorithm_that_cannot_be_made_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    entry = Entry(group=ALGORITHMS, id="mine", distribution="mine", version="1", target="mine:Mine")

    def broken(config: AlgorithmConfig) -> None:
        raise KeyError("gamma")

    monkeypatch.setattr(algorithms, "find_entry", lambda group, name: entry)
    monkeypatch.setattr(algorithms, "load_entry", lambda entry: broken)
    with pytest.raises(UserError, match=r"'mine' of mine 1 \(mine:Mine\) cannot be made: KeyError: 'gamma'"):
        load_algorithm(AlgorithmConfig(name="mine"))


def test_seats_that_are_not_trained_do_not_move_the_moments_of_a_batch() -> None:
    """An agent against its own past: rewards 1 and −1 of its trained seat, mean 0 and deviation 1; the frozen seat's count not."""
    games = []
    for i, reward in enumerate((1.0, -1.0)):
        e = episode(i, rewards={"pro": reward, "con": 7.0})
        pro, con = e.match.seats
        seats = (pro, msgspec.structs.replace(con, agent=pro.agent, trained=False))
        games.append(msgspec.structs.replace(e, match=msgspec.structs.replace(e.match, seats=seats)))
    found = load_algorithm(AlgorithmConfig(name="reinforce_pp")).advantages(games)
    assert found == [{"pro": pytest.approx(1.0)}, {"pro": pytest.approx(-1.0)}]
