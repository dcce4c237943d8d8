"""Role-conditioned advantages against numbers worked out by hand, and the algorithm seam."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from episode_samples import episode, seat
from selfplay.config.schema import AlgorithmConfig
from selfplay.errors import UnknownNameError, UserError
from selfplay.registry import ALGORITHMS, Entry
from selfplay.scoring import Algorithm, algorithms, load_algorithm
from selfplay.scoring.algorithms import agent_part, with_agent_part
from selfplay.scoring.rae import RoleConditioned

KUHN = "kuhn-poker-v0"


def rae(decay: float = 0.95) -> RoleConditioned:
    return RoleConditioned(AlgorithmConfig(baseline_decay=decay))


def test_the_baseline_used_is_the_one_before_its_update() -> None:
    algorithm = rae()
    wins = [episode(i, rewards={"pro": 1.0, "con": -1.0}) for i in range(2)]
    first, second = algorithm.advantages(wins)
    assert first == pytest.approx({"pro": 1.0, "con": -1.0})
    assert second == pytest.approx({"pro": 0.95, "con": -0.95})
    assert algorithm.baselines()[KUHN, "pro", "pro"] == pytest.approx(0.0975)


def test_one_reward_moves_the_baseline_by_a_twentieth() -> None:
    algorithm = rae()
    algorithm.advantages([episode()])
    assert algorithm.baselines()[KUHN, "pro", "pro"] == pytest.approx(0.05)


def test_when_the_attacker_always_wins_roles_learn_that_and_nobody_is_pushed() -> None:
    algorithm = rae()
    last = algorithm.advantages([episode(i) for i in range(400)])[-1]
    baselines = algorithm.baselines()
    assert baselines[KUHN, "pro", "pro"] == pytest.approx(1.0, abs=1e-6)
    assert baselines[KUHN, "con", "con"] == pytest.approx(-1.0, abs=1e-6)
    assert last == pytest.approx({"pro": 0.0, "con": 0.0}, abs=1e-6)


def test_seats_environments_and_agents_have_baselines_of_their_own() -> None:
    algorithm = rae()
    solo = (seat("pro", "solo"), seat("con", "solo"))
    algorithm.advantages([episode(0, seats=solo), episode(1, env="tictactoe-v0", seats=solo), episode(2)])
    assert set(algorithm.baselines()) == {
        (KUHN, "solo", "pro"), (KUHN, "solo", "con"), ("tictactoe-v0", "solo", "pro"), ("tictactoe-v0", "solo", "con"),
        (KUHN, "pro", "pro"), (KUHN, "con", "con"),
    }  # fmt: skip


def test_only_trained_seats_get_an_advantage() -> None:
    seats = (seat("pro"), seat("con", "random", trained=False, player="random"))
    assert rae().advantages([episode(seats=seats)]) == [{"pro": 1.0}]


def test_a_truncated_episode_teaches_nothing_and_moves_no_baseline() -> None:
    algorithm = rae()
    algorithm.advantages([episode(0)])
    before = algorithm.baselines()
    cut = episode(1, ended="truncated", rewards={"pro": 0.0, "con": 0.0}, winners=())
    assert algorithm.advantages([cut]) == [{"pro": 0.0, "con": 0.0}]
    assert algorithm.baselines() == before


def test_a_forfeit_is_a_result() -> None:
    lost = episode(0, ended="forfeit", offender="pro", rewards={"pro": -1.0, "con": 1.0}, winners=("con",))
    assert rae().advantages([lost]) == [{"pro": -1.0, "con": 1.0}]


def test_the_state_survives_json_and_goes_on_the_same() -> None:
    straight, first = rae(), rae()
    games = [episode(i, rewards={"pro": (-1.0) ** i / 3, "con": 0.1 * i}) for i in range(10)]
    expected = straight.advantages(games)
    begun = first.advantages(games[:4])
    resumed = rae()
    resumed.load_state(msgspec.json.decode(msgspec.json.encode(first.state())))
    assert [*begun, *resumed.advantages(games[4:])] == expected


def test_what_is_an_agents_can_be_taken_back_alone() -> None:
    old = {'["kuhn","pro","first"]': 0.25, '["kuhn","con","second"]': -0.25, "steps": 3.0}
    now = {'["kuhn","pro","first"]': 0.5, '["kuhn","pro","second"]': 0.1, '["kuhn","con","second"]': -0.5, "steps": 4.0}
    kept = agent_part(old, "pro")
    assert kept == {'["kuhn","pro","first"]': 0.25}
    assert with_agent_part(now, "pro", kept) == {
        '["kuhn","pro","first"]': 0.25, '["kuhn","con","second"]': -0.5, "steps": 4.0,
    }  # fmt: skip
    assert agent_part({"pro": 1.0, '["pro"]': 1.0, "[1,2,3]": 1.0}, "pro") == {}


def test_no_episodes_no_advantages() -> None:
    assert rae().advantages([]) == []


# ── the seam ─────────────────────────────────────────────────────────────────────────────────────


def offered(monkeypatch: pytest.MonkeyPatch, target: object) -> None:
    entry = Entry(group=ALGORITHMS, id="mine", distribution="mine", version="1", target="mine:Mine")
    monkeypatch.setattr(algorithms, "find_entry", lambda group, name: entry)
    monkeypatch.setattr(algorithms, "load_entry", lambda entry: target)


def test_the_default_algorithm_is_found_by_name() -> None:
    algorithm = load_algorithm(AlgorithmConfig())
    assert isinstance(algorithm.inner, RoleConditioned)
    assert isinstance(algorithm, Algorithm)


def test_an_unknown_algorithm_is_named_with_the_nearest() -> None:
    with pytest.raises(UnknownNameError, match="unknown algorithm 'rea'; did you mean 'rae'"):
        load_algorithm(AlgorithmConfig(name="rea"))


@pytest.mark.parametrize("target", [lambda config: SimpleNamespace(), "text", None])
def test_what_is_no_algorithm_is_refused(monkeypatch: pytest.MonkeyPatch, target: Any) -> None:
    offered(monkeypatch, target)
    with pytest.raises(UserError, match=r"'mine' of mine 1 .* needs the methods"):
        load_algorithm(AlgorithmConfig(name="mine"))


def test_anybodys_algorithm_is_made_from_the_config(monkeypatch: pytest.MonkeyPatch) -> None:
    offered(monkeypatch, RoleConditioned)
    algorithm = load_algorithm(AlgorithmConfig(name="mine", baseline_decay=0.0))
    algorithm.advantages([episode()])
    assert algorithm.state() == {f'["{KUHN}","pro","pro"]': 1.0, f'["{KUHN}","con","con"]': -1.0}
