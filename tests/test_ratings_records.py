"""Records that are hard to rate: the right words and finite numbers; teams, ties and many seats; honest intervals."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest

from selfplay.bench import ratings as bench
from selfplay.ratings import RatedGame, RatingTable, rate
from selfplay.ratings.games import places_of
from selfplay.tournament.words import elo_text, interval_text, seat_texts


def pairs(a: str, b: str, results: Sequence[tuple[int, int]], start: int = 0) -> list[RatedGame]:
    """Each result (places of a and b) once with a at the first seat, once with b there."""
    out = []
    for k, (mine, theirs) in enumerate(results):
        cluster = f"{a}-{b}-{start + k}"
        out.append(RatedGame(players=(a, b), places=(mine, theirs), cluster=cluster))
        out.append(RatedGame(players=(b, a), places=(theirs, mine), cluster=cluster))
    return out


WIN, LOSS, DRAW = (0, 1), (1, 0), (0, 0)


def finite(table: RatingTable) -> bool:
    numbers = [x for p in table.players for x in (p.elo, p.low, p.high) if x is not None]
    return all(map(math.isfinite, [*numbers, *table.seat_effects, *table.seat_low, *table.seat_high]))


def test_the_better_player_is_ahead_and_said_to_be() -> None:
    table = rate(pairs("a", "b", [WIN] * 60 + [LOSS] * 20 + [DRAW] * 10))
    first, second = table.players
    assert (first.player, first.rank_low, first.rank_high) == ("a", 1, 1)
    assert (second.rank_low, second.rank_high) == (2, 2)
    assert first.low is not None
    assert second.high is not None
    assert first.low > second.high
    assert table.tied_with_best == ()
    assert first.score == pytest.approx(65 / 90)
    assert first.bootstrap_low == pytest.approx(first.low, abs=20)
    assert finite(table)


def test_an_anchor_sets_the_scale() -> None:
    games = pairs("a", "b", [WIN] * 30 + [LOSS] * 10) + pairs("b", "c", [WIN] * 20 + [LOSS] * 20)
    table = rate(games, anchors={"b": 1000.0})
    assert table.of("b").elo == pytest.approx(1000.0)
    assert table.of("b").low == table.of("b").high == pytest.approx(1000.0)
    assert table.of("a").elo == pytest.approx(1000 + 400 * math.log10(3), abs=1e-6)
    assert table.reference == "b = 1000"


def test_equal_players_are_tied() -> None:
    table = rate(pairs("a", "b", [WIN, LOSS] * 20))
    assert table.tied_with_best == (table.players[1].player,)
    assert {(p.rank_low, p.rank_high) for p in table.players} == {(1, 2)}


def test_the_first_mover_always_wins() -> None:
    games = [RatedGame(players=p, places=(0, 1), cluster=f"{k}") for k in range(20) for p in (("a", "b"), ("b", "a"))]
    table = rate(games)
    assert any("same seat won every game" in r for r in table.remarks)
    assert [p.elo for p in table.players] == pytest.approx([0.0, 0.0], abs=1e-6)
    assert table.seat_effects[0] > 400
    assert finite(table)


def test_rock_paper_scissors_players() -> None:
    games = pairs("r", "s", [WIN] * 15) + pairs("s", "p", [WIN] * 15) + pairs("p", "r", [WIN] * 15)
    table = rate(games)
    assert not table.remarks
    assert [p.elo for p in table.players] == pytest.approx([0.0] * 3, abs=1e-6)
    assert {(p.rank_low, p.rank_high) for p in table.players} == {(1, 3)}


def test_all_draws() -> None:
    table = rate(pairs("a", "b", [DRAW] * 20))
    assert any("every game was drawn" in r for r in table.remarks)
    assert [p.elo for p in table.players] == pytest.approx([0.0, 0.0], abs=1e-9)
    assert table.draw_share == 1.0
    assert finite(table)


def test_one_game_only() -> None:
    table = rate([RatedGame(players=("a", "b"), places=WIN, cluster="0")])
    assert any("one pair" in r for r in table.remarks)
    assert table.of("a").flags == ("won every game: no upper bound",)
    assert table.tied_with_best == ("b",)
    assert finite(table)


def test_a_player_without_games_and_a_mirror() -> None:
    mirror = RatedGame(players=("a", "a"), places=WIN, cluster="m")
    table = rate([*pairs("a", "b", [WIN, LOSS, WIN]), mirror], players=["z"])
    assert table.of("z").elo is None
    assert table.of("z").flags == ("no games",)
    assert "without games: z" in table.remarks
    assert any("against itself" in r for r in table.remarks)
    assert table.num_games == 6


def test_two_groups_that_never_met() -> None:
    table = rate(pairs("a", "b", [WIN, LOSS, WIN] * 5) + pairs("x", "y", [WIN, LOSS] * 5))
    assert any("2 groups never met" in r for r in table.remarks)
    assert {g for g in table.groups} == {("a", "b"), ("x", "y")}
    assert table.of("x").flags == ("never met the main group",)
    assert finite(table)


def test_who_won_everything_has_no_upper_bound() -> None:
    table = rate(pairs("a", "b", [WIN] * 20) + pairs("b", "c", [WIN, LOSS] * 10))
    assert table.of("a").flags == ("won every game: no upper bound",)
    assert table.of("b").flags == ()
    assert table.players[0].player == "a"
    assert finite(table)


@pytest.mark.parametrize(("num", "clear"), [(1, False), (3, False), (5, False), (6, True), (8, True), (60, True)])
def test_how_many_pairs_must_all_be_won(num: int, clear: bool) -> None:
    """As a two-sided sign test over pairs has it: of five the chance is 1/16, of six 1/32."""
    table = rate(pairs("a", "b", [WIN] * num), anchors={"b": 0.0})
    first = table.of("a")
    assert table.tied_with_best == (() if clear else ("b",))
    assert (first.rank_low, first.rank_high) == ((1, 1) if clear else (1, 2))
    assert first.low is not None
    assert (first.low > 0) == clear
    assert finite(table)


def test_who_never_lost_and_drew_has_no_upper_bound_either() -> None:
    table = rate(pairs("a", "b", [WIN] * 20 + [DRAW] * 5))
    assert table.of("a").flags == ("never lost: no upper bound",)
    assert table.of("b").flags == ("never won: no lower bound",)
    assert any("never lost, or never won" in r for r in table.remarks)
    assert interval_text(table.of("a")).endswith("+∞")
    assert interval_text(table.of("b")).startswith("-∞")
    assert finite(table)


def test_figures_as_text() -> None:
    assert [elo_text(x) for x in (None, -0.3, 0.4, -12.6)] == ["–", "+0", "+0", "-13"]
    table = rate(pairs("a", "b", [WIN] * 30 + [LOSS] * 10), anchors={"b": 0.0})
    assert interval_text(table.of("b")) == "anchor"
    assert len(seat_texts(table)) == 1
    assert seat_texts(table)[0].startswith("+0 Elo (")
    assert seat_texts(rate(pairs("a", "b", [WIN, LOSS]))) == ["not known from these games"]


def test_a_seat_that_never_mattered_has_an_interval_all_the_same() -> None:
    table = rate(pairs("a", "b", [WIN, WIN, LOSS] * 10))
    (low, _), (high, _) = table.seat_low, table.seat_high
    assert low < -20 < 20 < high
    assert table.of("a").flags == ()


def test_players_that_kept_their_seats() -> None:
    games = [RatedGame(players=("a", "b"), places=WIN if k % 3 else LOSS, cluster=f"{k}") for k in range(30)]
    table = rate(games)
    assert any("kept to their seats" in r for r in table.remarks)
    assert table.seat_effects == ()
    assert finite(table)


def test_no_games_at_all() -> None:
    table = rate([], players=["a", "b"])
    assert table.remarks == ("no games between different players: nothing can be rated",)
    assert [p.elo for p in table.players] == [None, None]


def test_teams_and_ties_of_many() -> None:
    rng = np.random.default_rng(1)
    worth = dict(zip("abcd", (1.0, 0.5, -0.5, -1.0), strict=True))
    games = []
    for k in range(400):
        seats = [str(s) for s in rng.permutation(list("abcd"))]
        one, two = (np.exp((worth[seats[i]] + worth[seats[i + 2]]) / 2) for i in (0, 1))
        tie = 0.3 * (one * two) ** 0.5
        outcome = int(rng.choice(3, p=np.array([one, two, tie]) / (one + two + tie)))
        places = {0: (0, 1, 0, 1), 1: (1, 0, 1, 0), 2: (0, 0, 0, 0)}[outcome]
        games.append(RatedGame(players=tuple(seats), places=places, teams=(0, 1, 0, 1), cluster=f"{k:03d}"))
    table = rate(games)
    assert [p.player for p in table.players] == list("abcd")
    assert table.draw_share == pytest.approx(0.13, abs=0.06)
    assert finite(table)


def test_places_follow_the_games_verdict() -> None:
    seats = ("a", "b", "c")
    assert places_of(seats, ("b",), {"a": 0.0, "b": 2.0, "c": -2.0}) == (1, 0, 2)
    assert places_of(seats, ("a", "b"), {"a": 1.0, "b": 0.5, "c": -1.5}) == (0, 0, 1)
    assert places_of(seats, (), {"a": 5.0, "b": 0.0, "c": 0.0}) == (0, 0, 0)
    assert places_of(("a", "b"), ("a",), {"a": -1.0, "b": 1.0}) == (0, 1)


@pytest.mark.parametrize(("world", "seed"), [(bench.FIVE, 1), (bench.TWO, 2)])
def test_intervals_hold_the_truth_as_often_as_they_say(world: bench.World, seed: int) -> None:
    """Binomial noise of 150 tournaments around the nominal share; `selfplay bench ratings` runs many more."""
    share, _ = bench.coverage(world, 150, seed)
    assert 0.91 <= share <= 0.985


def test_intervals_of_four_seats_hold_the_truth() -> None:
    share, _ = bench.coverage(bench.FOUR_SEATS, 30, 3)
    assert 0.9 <= share <= 0.99


def test_the_plain_method_gives_the_same_intervals() -> None:
    games = bench.play_all(bench.FIVE, 10, np.random.default_rng(9))
    ours = bench.intervals(bench.FIVE, games)[1]
    assert ours == pytest.approx(bench.plain_half_widths(bench.FIVE, games), rel=1e-5)
