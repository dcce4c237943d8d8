"""Every algorithm's advantages against numbers worked out by hand."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from episode_samples import episode, seat, turn
from selfplay.config.schema import AlgorithmConfig
from selfplay.errors import ConfigError
from selfplay.scoring import Algorithm, load_algorithm, turn_credit
from selfplay.types import Ended, Episode

GROUPED = ("grpo", "dr_grpo", "rloo")


def algorithm(name: str, **settings: Any) -> Algorithm:
    return load_algorithm(AlgorithmConfig(name=name, **({"group": 4} | settings)))


def games(rewards: list[float], *, seed: int = 5, ended: Ended = "natural", first: int = 0) -> list[Episode]:
    """Games of one scenario; what ``pro`` wins ``con`` loses."""
    out = []
    for i, r in enumerate(rewards):
        e = episode(first + i, rewards={"pro": r, "con": -r}, ended=ended)
        out.append(msgspec.structs.replace(e, match=msgspec.structs.replace(e.match, seed=seed)))
    return out


def pro(name: str, episodes: list[Episode], **settings: Any) -> list[float]:
    return [a["pro"] for a in algorithm(name, **settings).advantages(episodes)]  # type: ignore[misc]


def test_grpo_centres_and_scales() -> None:
    """Rewards 1, 1, −1, 3: mean 1, deviations 0, 0, −2, 2, standard deviation √2."""
    assert pro("grpo", games([1, 1, -1, 3])) == pytest.approx([0, 0, -(2**0.5), 2**0.5])


def test_dr_grpo_centres_only() -> None:
    assert pro("dr_grpo", games([1, 1, -1, 3])) == pytest.approx([0, 0, -2, 2])


def test_rloo_leaves_one_out() -> None:
    """−1 against the mean of 1, 1, 3 is −1 − 5/3; 3 against that of 1, 1, −1 is 3 − 1/3."""
    assert pro("rloo", games([1, 1, -1, 3])) == pytest.approx([0, 0, -8 / 3, 8 / 3])


def test_reinforce_is_the_reward() -> None:
    assert pro("reinforce", games([1, 1, -1, 3])) == [1, 1, -1, 3]


def test_reinforce_pp_normalises_over_the_agents_whole_batch() -> None:
    """Scenarios do not matter: 1, 1, −1, 3 as above, though they are of two seeds."""
    episodes = games([1, 1], seed=1) + games([-1, 3], seed=2)
    assert pro("reinforce_pp", episodes) == pytest.approx([0, 0, -(2**0.5), 2**0.5])


@pytest.mark.parametrize("name", GROUPED)
def test_groups_are_scenarios_and_seats_of_their_own(name: str) -> None:
    """Two scenarios of two games; one agent at both seats is compared with itself at the same seat only."""
    solo = (seat("pro", "solo"), seat("con", "solo"))
    episodes = [
        msgspec.structs.replace(e, match=msgspec.structs.replace(e.match, seats=solo))
        for e in games([3, 1], seed=1) + games([-1, -1], seed=2)
    ]
    found = algorithm(name).advantages(episodes)
    assert [a["pro"] for a in found][2:] == [0, 0]
    assert found[0]["pro"] > 0 > found[1]["pro"]  # type: ignore[operator]
    assert [a["con"] for a in found] == pytest.approx([-a["pro"] for a in found])  # type: ignore[operator]


@pytest.mark.parametrize("name", [*GROUPED, "reinforce_pp"])
def test_equal_rewards_and_a_group_of_one_have_no_signal(name: str) -> None:
    assert pro(name, games([2.0, 2.0, 2.0])) == [0, 0, 0]
    assert pro(name, games([2.0])) == [0]


@pytest.mark.parametrize("name", [*GROUPED, "reinforce", "reinforce_pp"])
def test_a_truncated_game_has_no_result(name: str) -> None:
    """It gets 0 and moves nobody's mean: the others are as without it."""
    whole = games([1, -1, 3])
    cut = games([9.0], ended="truncated", first=7)
    assert pro(name, whole + cut) == pytest.approx([*pro(name, whole), 0.0])


@pytest.mark.parametrize("name", GROUPED)
def test_groups_need_a_group(name: str) -> None:
    with pytest.raises(ConfigError, match=r"algorithm\.group=1: set it to 2 or more"):
        algorithm(name, group=1)


@pytest.mark.parametrize("name", [*GROUPED, "reinforce", "reinforce_pp"])
def test_what_remembers_nothing_saves_nothing(name: str) -> None:
    chosen = algorithm(name)
    chosen.load_state(chosen.state())
    assert chosen.state() == {}


# ── turn-level credit ────────────────────────────────────────────────────────────────────────────


def three_turns(*moves: str | None, ended: Ended = "natural") -> Episode:
    turns = [turn("pro", (1,), (2,), move=m) for m in moves]
    return episode(turns=(*turns, turn("con", (1,), (2,))), ended=ended)


def credit(e: Episode, value: Any, **settings: Any) -> Any:
    return turn_credit(e, {"pro": value, "con": 0.5}, AlgorithmConfig(**settings))


def test_discount_counts_from_the_seats_last_turn() -> None:
    """A = 2 over three turns at ½: ½, 1, 2; the other seat has one turn, its last."""
    assert credit(three_turns("a", "b", "c"), 2.0, discount=0.5) == {"pro": [0.5, 1.0, 2.0], "con": [0.5]}


def test_the_offending_turn_pays() -> None:
    found = credit(three_turns("a", None, "c"), 1.0, illegal_penalty=3.0)
    assert found == {"pro": [1.0, -2.0, 1.0], "con": [0.5]}


def test_advantages_per_turn_are_discounted_likewise() -> None:
    assert credit(three_turns("a", "b", "c"), [4.0, 2.0, 1.0], discount=0.5)["pro"] == [1.0, 1.0, 1.0]


def test_without_settings_nothing_changes() -> None:
    assert credit(three_turns("a", None, "c"), 2.0) == {"pro": 2.0, "con": 0.5}


def test_a_cut_game_pays_nothing() -> None:
    assert credit(three_turns("a", None, ended="truncated"), 0.0, illegal_penalty=3.0) == {"pro": 0.0, "con": 0.5}
