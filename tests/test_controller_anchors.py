"""Games against players that never change: who sits where, what is counted, and what happens when a game fails."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from episode_samples import encode, episode
from selfplay.cli.view import evaluation_line
from selfplay.config import load_config
from selfplay.controller.anchors import END_INDEX, FIRST_INDEX, AnchorGames, check_anchors, shares_of
from selfplay.controller.evaluator import Evaluations, plan_evaluation
from selfplay.controller.waits import Waits
from selfplay.errors import ConfigError, WorkerError
from selfplay.league import Matchmaker
from selfplay.pool import EpisodeResult, FailedResult
from selfplay.registry import describe
from selfplay.types import Match

BOTS = ("llm", "human", "api", "random", "minimax")


def matchmaker(*overrides: str) -> Matchmaker:
    config = load_config(None, ["env=tictactoe-v0", "seed=3", *overrides])
    return Matchmaker(describe("tictactoe-v0", {}), config, known_players=BOTS)


def ended(match: Match, winners: tuple[str, ...]) -> EpisodeResult:
    rewards = {s.seat: (0.0 if not winners else 1.0 if s.seat in winners else -1.0) for s in match.seats}
    e = msgspec.structs.replace(episode(0), match=match, winners=winners, rewards=rewards)
    return EpisodeResult(match=match, episode=e, data=encode(e))


class Pool:
    """Answers each match at once, as ``answer`` says."""

    def __init__(self, answer: Callable[[Match], Any]) -> None:
        self.answer, self.played = answer, list[Match]()
        self.games: AnchorGames | None = None

    async def submit(self, match: Match) -> None:
        self.played.append(match)
        assert self.games is not None
        assert self.games.take(self.answer(match))


def play(
    answer: Callable[[Match], Any], *anchors: str, games: int = 2
) -> tuple[dict[str, float], list[Match], list[str]]:
    said: list[str] = []
    pool: Any = Pool(answer)
    pool.games = AnchorGames(matchmaker(), anchors, games=games, seed=3, pool=pool, waits=Waits(), say=said.append)
    return asyncio.run(pool.games.play()), pool.played, said


def test_each_trained_seat_meets_each_anchor_in_the_same_scenarios_every_time() -> None:
    _, played, _ = play(lambda m: ended(m, ("x",)), "random", "base")
    sat = [tuple((s.seat, s.player, s.agent, s.trained) for s in m.seats) for m in played]
    assert sat[::2] == [
        (("x", "llm", "x", False), ("o", "random", "random", False)),
        (("x", "random", "random", False), ("o", "llm", "o", False)),
        (("x", "llm", "x", False), ("o", "llm", "base", False)),
        (("x", "llm", "base", False), ("o", "llm", "o", False)),
    ]
    assert len({m.seed for m in played}) == 8
    assert min(m.index for m in played) == FIRST_INDEX
    _, again, _ = play(lambda m: ended(m, ("x",)), "random", "base")
    assert [m.seed for m in again] == [m.seed for m in played]


def test_points_count_draws_half_and_come_with_an_interval() -> None:
    """x wins both of its games; o draws one of two and loses the other: 2½ points of 4."""
    winners = iter([("x",), ("x",), (), ("x",)])
    found, _, _ = play(lambda m: ended(m, next(winners)), "random")
    assert found["random/points"] == pytest.approx(2.5 / 4)
    assert (found["random/x/won"], found["random/o/drawn"], found["random/o/lost"]) == (1.0, 0.5, 0.5)
    assert found["random/o/reward"] == pytest.approx(-0.5)
    assert found["random/low"] < 2.5 / 4 < found["random/high"]


def failed(match: Match, kind: str) -> FailedResult:
    return FailedResult(match=match, kind=kind, reason="r", message="broke", traceback="")  # type: ignore[arg-type]


def test_what_infrastructure_spoilt_is_played_again_and_a_game_that_fails_is_said_and_counted() -> None:
    def answer(match: Match) -> Any:
        if match.index == FIRST_INDEX and match.attempt == 0:
            return failed(match, "infrastructure")
        return failed(match, "environment") if match.index == FIRST_INDEX + 1 else ended(match, ("x",))

    found, played, said = play(answer, "random")
    assert [m.attempt for m in played if m.index == FIRST_INDEX] == [0, 1]
    assert (found["random/x/failed"], found["random/x/won"]) == (1.0, 1.0)
    assert len(said) == 1
    assert "x against random" in said[0]


def test_a_pairing_without_any_game_ends_the_run() -> None:
    with pytest.raises(WorkerError, match="every game of x against random failed"):
        play(lambda m: failed(m, "infrastructure"), "random")


def test_games_of_training_and_of_the_gate_are_left_alone() -> None:
    pool: Any = Pool(lambda m: m)
    games = AnchorGames(matchmaker(), ["random"], games=1, seed=0, pool=pool, waits=Waits(), say=lambda _: None)
    for index in (5, END_INDEX):
        assert not games.take(ended(matchmaker().match(index), ("x",)))
    assert not Evaluations(None, None).take(ended(matchmaker().match(5), ()))


def test_shares_add_up() -> None:
    match = matchmaker().match(0)
    shares = shares_of("x", [ended(match, w).episode for w in (("x",), ("o",), (), ())])
    assert shares == {"won": 0.25, "drawn": 0.5, "lost": 0.25, "reward": 0.0}


@pytest.mark.parametrize(
    ("anchors", "words"),
    [
        (("randm",), "'randm' is not a player that can be met; did you mean 'random'"),
        (("human",), "'human' is not a player"),
        (("equilibrium",), "'equilibrium' is not a player"),
        (("random", "random"), "names 'random' twice"),
    ],
)
def test_anchors_that_cannot_be_met_are_refused(anchors: tuple[str, ...], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        check_anchors(anchors, BOTS, matchmaker().match(0))


def test_an_anchor_that_does_not_know_the_game_is_refused() -> None:
    config = load_config(None, ["env=kuhn-poker-v0"])
    plain = Matchmaker(describe("kuhn-poker-v0", {}), config, known_players=BOTS).match(0)
    with pytest.raises(ConfigError, match="minimax cannot play kuhn-poker-v0"):
        check_anchors(("minimax",), BOTS, plain)


def test_evaluation_by_games_alone_needs_somebody_to_meet() -> None:
    config = load_config(None, ["env=tictactoe-v0", "eval.every=1", "eval.exact=false"])
    with pytest.raises(ConfigError, match=r"measures nothing: name players in eval\.anchors"):
        plan_evaluation(config, matchmaker().match(0).seats)
    with_anchor = load_config(None, ["env=tictactoe-v0", "eval.every=1", "eval.exact=false", 'eval.anchors=["random"]'])
    assert plan_evaluation(with_anchor, matchmaker().match(0).seats) is None


def test_a_person_sees_points_and_their_interval() -> None:
    report: Any = type("Report", (), {"evaluation": {"random/points": 0.95, "random/low": 0.91, "random/high": 0.97}})()
    assert evaluation_line(report) == "against random 95% of points (91% to 97%)  "


@pytest.mark.parametrize(("legal", "told"), [(0.995, "NashConv 0.667 ("), (0.004, "NashConv 0.667, 3.977 as played (")])
def test_answers_that_are_no_moves_are_not_hidden_by_the_rest(legal: float, told: str) -> None:
    figures = {"nash_conv": 0.667, "nash_conv_as_played": 3.977, "average_nash_conv": 0.667, "legal_mass": legal}
    report: Any = type("Report", (), {"evaluation": figures})()
    assert told in evaluation_line(report)
