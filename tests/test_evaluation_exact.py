"""Exact evaluation against published and closed-form values, and against OpenSpiel."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Mapping, Sequence

import pytest
from pyspiel import Game, State, TabularPolicy, load_game  # type: ignore[attr-defined]
from pyspiel import nash_conv as open_spiel_nash_conv  # type: ignore[attr-defined]

from selfplay.environment import Environment, Outcome
from selfplay.errors import UserError
from selfplay.evaluation import GameTree, build_tree, solve, uniform_policy
from selfplay.evaluation.cfr import cfr_plus
from selfplay.evaluation.chance import ListedRandom, all_ways
from selfplay.evaluation.sampled import _shown, sampled_exploitability
from selfplay.evaluation.solve import best_response_value, reach_probabilities, values
from selfplay_agents.equilibrium import bet_probability


def always(tree: GameTree, move: str) -> list[list[float]]:
    return [[float(m == move) for m in s.moves] for s in tree.states]


def test_kuhn_has_the_published_size_and_values() -> None:
    tree = build_tree("kuhn-poker-v0")
    assert len(tree.states) == 12
    uniform = solve(tree, uniform_policy(tree))
    assert uniform.nash_conv == pytest.approx(11 / 12)
    assert uniform.values == pytest.approx((1 / 8, -1 / 8))
    assert solve(tree, always(tree, "bet")).nash_conv == pytest.approx(2 / 3)
    assert solve(tree, always(tree, "pass")).nash_conv == pytest.approx(2.0)


def test_kuhn_with_three_players() -> None:
    tree = build_tree("kuhn-poker-v0", {"players": 3})
    assert len(tree.states) == 48
    assert solve(tree, uniform_policy(tree)).nash_conv == pytest.approx(2.0625)


def kuhn_row(history: Sequence[str], card: str, alpha: float) -> list[float]:
    p = bet_probability(tuple(history), card, alpha)
    return [1 - p, p]


@pytest.mark.parametrize("alpha", [0.0, 0.2, 1 / 3])
def test_the_equilibria_of_kuhn_poker_cannot_be_beaten(alpha: float) -> None:
    tree = build_tree("kuhn-poker-v0")
    policy = []
    for state in tree.states:
        card = state.decision.view.split("Card: ")[1][0]
        told = state.decision.view.split("History: ")[1].split(".")[0]
        policy.append(kuhn_row([] if told == "none" else told.split(", "), card, alpha))
    found = solve(tree, policy)
    assert found.nash_conv == pytest.approx(0.0, abs=1e-12)
    assert found.values[0] == pytest.approx(-1 / 18)


def open_spiel_policy(
    game: Game, tree: GameTree, policy: Sequence[Sequence[float]]
) -> Mapping[str, list[tuple[int, float]]]:
    """Our policy by OpenSpiel's information states: cards 0, 1, 2 and p or b per action."""
    table: dict[str, list[tuple[int, float]]] = {}
    for state, row in zip(tree.states, policy, strict=True):
        view = state.decision.view
        deck = "JQK" if len(tree.seats) == 2 else "TJQK"
        card = deck.index(view.split("Card: ")[1][0])
        told = view.split("History: ")[1].split(".")[0]
        key = str(card) + ("" if told == "none" else "".join(m[0] for m in told.split(", ")))
        table[key] = [(0, row[0]), (1, row[1])]
    return table


@pytest.mark.parametrize("players", [2, 3])
def test_random_policies_agree_with_open_spiel(players: int) -> None:
    tree = build_tree("kuhn-poker-v0", {"players": players})
    game: Game = load_game(f"kuhn_poker(players={players})")
    rng = random.Random(7)
    for _ in range(3):
        policy = [[1 - p, p] for p in (rng.random() for _ in tree.states)]
        theirs = open_spiel_nash_conv(game, TabularPolicy(dict(open_spiel_policy(game, tree, policy))))
        assert solve(tree, policy).nash_conv == pytest.approx(theirs, abs=1e-9)


class OpenSpielGame(Environment):
    """An OpenSpiel game as an environment, its chance drawn by the environment's generator."""

    name = ""
    reward_range = (-13.0, 13.0)

    def __init__(self, rng: random.Random) -> None:
        super().__init__(rng)
        self._state: State = load_game(self.name).new_initial_state()
        self.seats = ("a", "b")
        self._deal()

    def _deal(self) -> None:
        while self._state.is_chance_node():
            actions, weights = zip(*self._state.chance_outcomes(), strict=True)
            self._state.apply_action(self.rng.choices(actions, weights)[0])

    def rules(self, seat: str) -> str:
        return self.name

    def to_move(self) -> Sequence[str]:
        return () if self._state.is_terminal() else (self.seats[self._state.current_player()],)

    def view(self, seat: str) -> str:
        return str(self._state.information_state_string())

    def legal_moves(self, seat: str) -> Sequence[str]:
        return [f"m{a}" for a in self._state.legal_actions()]

    def step(self, moves: Mapping[str, str]) -> None:
        ((_, move),) = moves.items()
        self._state.apply_action(int(move[1:]))
        self._deal()

    def outcome(self) -> Outcome:
        return Outcome(rewards=dict(zip(self.seats, self._state.returns(), strict=True)))


class Leduc(OpenSpielGame):
    name = "leduc_poker"


def register(monkeypatch: pytest.MonkeyPatch, kind: type[Environment]) -> None:
    for module in ("tree",):
        monkeypatch.setattr(f"selfplay.evaluation.{module}.resolve_environment_id", lambda name: name)
        monkeypatch.setattr(f"selfplay.evaluation.{module}.environment_parameters", lambda _: ())
        monkeypatch.setattr(f"selfplay.evaluation.{module}.load_environment", lambda _: kind)


def test_leduc_has_the_published_size_and_values(monkeypatch: pytest.MonkeyPatch) -> None:
    register(monkeypatch, Leduc)
    tree = build_tree("leduc-v0")
    assert len(tree.states) == 936
    found = solve(tree, uniform_policy(tree))
    assert found.nash_conv == pytest.approx(4.747222, abs=1e-6)
    assert found.exploitability == pytest.approx(4.747222 / 2, abs=1e-6)
    assert found.values[0] == pytest.approx(-0.078125)


class Pennies(Environment):
    """Matching pennies, both at once, with a coin that decides who wants to match: draws within a step too."""

    seats = ("a", "b")

    def __init__(self, rng: random.Random) -> None:
        super().__init__(rng)
        self._wants = rng.randrange(2)
        self._made: Mapping[str, str] = {}

    def rules(self, seat: str) -> str:
        return "heads or tails"

    def view(self, seat: str) -> str:
        return f"{self.seats[self._wants]} wants to match"

    def to_move(self) -> Sequence[str]:
        return () if self._made else self.seats

    def legal_moves(self, seat: str) -> Sequence[str]:
        return ("heads", "tails")

    def step(self, moves: Mapping[str, str]) -> None:
        self._made = dict(moves)
        self._bonus = self.rng.choice((0.0, 0.5))

    def outcome(self) -> Outcome:
        winner = self.seats[self._wants if self._made["a"] == self._made["b"] else 1 - self._wants]
        return Outcome(rewards={s: (1 if s == winner else -1) * (1 - self._bonus) for s in self.seats})


def test_simultaneous_moves_are_hidden_and_chance_may_fall_anywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    register(monkeypatch, Pennies)
    tree = build_tree("pennies-v0")
    assert len(tree.states) == 4  # each seat, each role; neither knows the other's move
    assert solve(tree, uniform_policy(tree)).nash_conv == pytest.approx(0.0)
    assert solve(tree, always(tree, "heads")).best_response == pytest.approx((0.75, 0.75))


def test_what_makes_no_legal_move_goes_to_the_forfeit() -> None:
    tree = build_tree("kuhn-poker-v0")
    half = [[p * 0.5 for p in row] for row in uniform_policy(tree)]
    silent = [[0.0, 0.0] for _ in tree.states]
    assert values(tree, silent) == pytest.approx((-2.0, 2.0))
    assert sum(values(tree, half)) == pytest.approx(0.0)
    assert reach_probabilities(tree, silent)[0] == pytest.approx(1 / 3)
    assert best_response_value(tree, silent, 0) == pytest.approx(2.0)  # pass, and the other seat forfeits


def test_all_ways_lists_every_draw_once() -> None:
    rng = ListedRandom()

    def deal() -> tuple[object, ...]:
        cards = ["a", "b", "c"]
        rng.shuffle(cards)
        return (*cards, rng.choices(("x", "y", "z"), (1, 0, 3))[0])

    found = list(all_ways(rng, deal))
    assert len(found) == len({way for _, way in found}) == 12
    assert sum(p for p, _ in found) == pytest.approx(1.0)
    assert {way[3] for _, way in found} == {"x", "z"}


@pytest.mark.parametrize("draw", ["random", "gauss", "uniform"])
def test_draws_from_a_continuum_are_refused(draw: str) -> None:
    rng = ListedRandom()
    with pytest.raises(UserError, match="cannot be listed"):
        getattr(rng, draw)(*([0.0, 1.0] if draw != "random" else []))


def test_a_game_that_draws_until_something_fits_is_refused() -> None:
    """With a script every draw beyond its end is the same, so such a loop would never end."""
    rng = ListedRandom()

    def deal() -> None:
        while rng.randrange(6) != 5:
            pass

    with pytest.raises(UserError, match="more than 1,000 times at once"):
        next(all_ways(rng, deal))
    with pytest.raises(UserError, match=r"cannot be listed|too large"):
        build_tree("negotiation-v0")


def test_ways_of_chance_count_as_histories() -> None:
    with pytest.raises(UserError, match="more than 3 histories"):
        build_tree("kuhn-poker-v0", max_nodes=3)


def test_games_that_cannot_be_solved_say_why() -> None:
    with pytest.raises(UserError, match="too large"):
        build_tree("tictactoe-v0", max_nodes=1000)
    with pytest.raises(UserError, match="jury"):
        build_tree("debate-v0")
    with pytest.raises(UserError, match="kuhn-poker"):
        build_tree("kuhn-pokr-v0")


def test_a_policy_of_another_shape_is_refused() -> None:
    tree = build_tree("kuhn-poker-v0")
    with pytest.raises(ValueError, match="12"):
        solve(tree, [])
    with pytest.raises(ValueError, match="do not fit"):
        solve(tree, [[0.7, 0.7]] * 12)


@pytest.mark.parametrize(("samples", "expected"), [(8, 0.147), (32, 0.075), (128, 0.039), (512, 0.019), (2048, 0.008)])
def test_the_bias_of_the_plug_in_estimate_near_the_optimum(samples: int, expected: float) -> None:
    """Which optimum it is moves it by some percent."""
    tree = build_tree("kuhn-poker-v0")
    perfect = cfr_plus(tree, 200)
    shown = [_shown(tree, perfect, samples, random.Random(seed)) for seed in range(3)]
    assert sum(shown) / 3 == pytest.approx(expected, rel=0.2)


def test_sampling_shows_a_perfect_player_as_exploitable() -> None:
    tree = build_tree("kuhn-poker-v0")
    report = asyncio.run(sampled_exploitability(tree, "equilibrium", {}, samples=32))
    assert report.equilibrium_shows == pytest.approx(0.075, rel=0.2)
    assert report.bias > 0


def test_cfr_finds_the_equilibrium() -> None:
    tree = build_tree("kuhn-poker-v0")
    found = solve(tree, cfr_plus(tree, 300))
    assert found.nash_conv < 0.01
    assert found.values[0] == pytest.approx(-1 / 18, abs=2e-3)
