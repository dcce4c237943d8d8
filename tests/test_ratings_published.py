"""Ratings and sequential tests against published numbers."""

from __future__ import annotations

import random
from fractions import Fraction
from functools import cache

import numpy as np
import pytest
from tests.rating_data import BASEBALL, NASCAR, PUDDINGS

from selfplay.errors import ConfigError
from selfplay.ratings import RatedGame, rate
from selfplay.ratings.design import Design, build_design
from selfplay.ratings.logit import Fit, fit
from selfplay.ratings.match import (
    Hypotheses,
    expected_score,
    log_likelihood_ratio,
    logistic_elo,
    match_stats,
    pentanomial,
    sprt,
    trinomial,
)
from selfplay.ratings.meta import alpha_rank, cyclic_share, nash_average
from selfplay.ratings.shares import wilson


def series(a: str, b: str, wins: int, losses: int, draws: int = 0) -> list[RatedGame]:
    """Games with ``a`` at the first seat, each a cluster of its own."""
    places = [(0, 1)] * wins + [(1, 0)] * losses + [(0, 0)] * draws
    return [RatedGame(players=(a, b), places=p, cluster=f"{a} {b} {i}") for i, p in enumerate(places)]


def fitted(games: list[RatedGame], *, seat_effects: bool) -> tuple[Design, Fit]:
    names = sorted({p for g in games for p in g.players})
    design = build_design(games, names, seat_effects=seat_effects)
    return design, fit(design)


def strengths(design: Design, found: Fit) -> dict[str, float]:
    columns = zip(design.columns.players, design.columns.player_column, strict=True)
    return {p: 0.0 if c is None else float(found.estimate[c]) for p, c in columns}


def test_davidsons_puddings() -> None:
    games = []
    for record in PUDDINGS.strip(" /").split(" / "):
        i, j, wins, losses, draws = record.split()
        games += series(i, j, int(wins), int(losses), int(draws))
    design, found = fitted(games, seat_effects=False)
    worth = np.exp(list(strengths(design, found).values()))
    expected = [0.13880, 0.17300, 0.16175, 0.16537, 0.15869, 0.20239]
    assert worth / worth.sum() == pytest.approx(expected, abs=2e-5)
    assert np.exp(found.estimate[design.columns.tie_column[0]]) == pytest.approx(0.74682, abs=2e-5)


def test_agrestis_baseball_with_home_effect() -> None:
    games = []
    for line in BASEBALL.strip().splitlines():
        home, _, rest = line.partition(": ")
        for record in rest.split(", "):
            visitor, won, lost = record.split()
            games += series(home, visitor, int(won), int(lost))
    design, found = fitted(games, seat_effects=True)
    expected = {
        "Boston": 1.1438, "Cleveland": 0.7047, "Detroit": 1.4754, "Milwaukee": 1.6196, "New_York": 1.2813, "Toronto": 1.3271,
        "Baltimore": 0.0,
    }  # fmt: skip
    assert strengths(design, found) == pytest.approx(expected, abs=6e-5)
    (home_column, _) = design.columns.seat_column
    assert found.estimate[home_column] == pytest.approx(0.3023, abs=5e-5)
    information = np.linalg.inv(_model_information(design, found))
    assert information[home_column, home_column] ** 0.5 == pytest.approx(0.131, abs=5e-4)


def _model_information(design: Design, found: Fit) -> np.ndarray:
    counts = np.asarray(design.taken.sum(axis=0)).ravel()
    rows = design.rows
    total = np.zeros((design.columns.num, design.columns.num))
    for c in range(len(design.starts)):
        at = np.flatnonzero(design.choice == c)
        p = np.exp(rows[at] @ found.estimate)
        p /= p.sum()
        mean = p @ rows[at]
        total += counts[at].sum() * ((rows[at].T * p) @ rows[at] - np.outer(mean, mean))
    return total


def test_hunters_nascar_season() -> None:
    races = [line.split() for line in NASCAR.strip().splitlines()]
    games = [RatedGame(players=tuple(r), places=tuple(range(len(r))), cluster=f"{i:02d}") for i, r in enumerate(races)]
    design, found = fitted(games, seat_effects=False)
    by_driver = strengths(design, found)
    assert len(by_driver) == 83
    assert not found.separated
    jones, pruett, martin, reference = (by_driver[d] for d in ("58", "68", "51", "1"))
    assert [x - reference for x in (jones, pruett, martin)] == pytest.approx([4.1477, 3.6162, 2.0763], abs=6e-5)
    shares = np.exp(list(by_driver.values()))
    assert np.exp(jones) / shares.sum() == pytest.approx(0.1864, abs=5e-5)  # in the paper's own scale


def test_open_spiels_elo_case() -> None:
    wins = {("A", "B"): (4, 1), ("A", "C"): (2, 3), ("B", "C"): (2, 3)}
    games = [g for (a, b), (w, v) in wins.items() for g in series(a, b, w, v)]
    r = strengths(*fitted(games, seat_effects=False))
    assert r["A"] == pytest.approx(r["C"])
    assert r["A"] > r["B"]
    drawn = RatedGame(players=("A", "B"), places=(0, 0), cluster="draw")
    r = strengths(*fitted([*games, drawn], seat_effects=False))
    assert r["C"] > r["A"]


def test_wins_draws_losses() -> None:
    found = match_stats(trinomial(136, 111, 96))
    assert (found.elo, found.elo_error) == pytest.approx((40.70, 30.43), abs=5e-3)
    assert (found.normalised_elo, found.normalised_error) == pytest.approx((49.77, 36.77), abs=5e-3)
    assert found.los == pytest.approx(0.9960, abs=5e-5)


def test_pentanomial() -> None:
    found = match_stats(pentanomial((34, 54, 31 + 32, 64, 75)))
    assert (found.elo, found.elo_error) == pytest.approx((55.58, 27.65), abs=5e-3)
    assert (found.normalised_elo, found.normalised_error) == pytest.approx((57.94, 28.28), abs=5e-3)


@pytest.mark.parametrize(
    ("scores", "elos", "model", "expected"),
    [
        (trinomial(36433, 68692, 36027), (0, 2), "normalised", 0.9233),
        (trinomial(21404, 40708, 21184), (0.5, 2.5), "logistic", -1.5719),
        (pentanomial((365, 16618, 36029 + 200, 16974, 390)), (0, 2), "normalised", 2.2504),
        (pentanomial((223, 9863, 20279 + 1000, 10037, 246)), (0.5, 2.5), "logistic", -3.0741),
        (trinomial(60, 0, 40), (0, 50), "logistic", 1.846259),
    ],
)
def test_sprt(scores: object, elos: tuple[float, float], model: str, expected: float) -> None:
    hypotheses = Hypotheses(elo0=elos[0], elo1=elos[1], model=model)  # type: ignore[arg-type]
    places = 6 if expected == 1.846259 else 4
    assert log_likelihood_ratio(scores, hypotheses) == pytest.approx(expected, abs=0.6 * 10**-places)  # type: ignore[arg-type]


def test_sprt_decides_at_its_bounds() -> None:
    hypotheses = Hypotheses(elo0=0, elo1=50)
    assert hypotheses.bounds == pytest.approx((-2.944439, 2.944439), abs=1e-6)
    assert sprt(trinomial(60, 0, 40), hypotheses).decision is None
    assert sprt(trinomial(0, 0, 0), hypotheses).llr == 0.0
    assert sprt(trinomial(120, 0, 60), hypotheses).decision == "H1"
    assert sprt(trinomial(60, 0, 80), hypotheses).decision == "H0"
    assert sprt(pentanomial((0, 0, 0, 0, 30)), hypotheses).decision == "H1"
    with pytest.raises(ConfigError, match="elo0 < elo1"):
        Hypotheses(elo0=5, elo1=5)


@cache
def _tictactoe(board: str) -> tuple[Fraction, Fraction, Fraction]:
    """(first seat wins, draws, loses) when both move at random."""
    lines = ("012", "345", "678", "036", "147", "258", "048", "246")
    for line in lines:
        marks = {board[int(c)] for c in line}
        if len(marks) == 1 and marks != {"."}:
            return (Fraction(marks == {"x"}), Fraction(0), Fraction(marks == {"o"}))
    free = [i for i, c in enumerate(board) if c == "."]
    if not free:
        return Fraction(0), Fraction(1), Fraction(0)
    mark = "xo"[(9 - len(free)) % 2]
    parts = [_tictactoe(board[:i] + mark + board[i + 1 :]) for i in free]
    return tuple(sum(p[k] for p in parts) / len(parts) for k in range(3))  # type: ignore[return-value]


def test_random_tictactoe_in_elo() -> None:
    win, draw, loss = _tictactoe("." * 9)
    assert (win, draw, loss) == (Fraction(737, 1260), Fraction(8, 63), Fraction(121, 420))
    score = float(win + draw / 2)
    assert score == pytest.approx(0.648413, abs=5e-7)
    assert logistic_elo(score) == pytest.approx(106.33, abs=5e-3)
    assert expected_score(logistic_elo(score) or 0.0) == pytest.approx(score)


def test_order_of_games_changes_nothing_at_all() -> None:
    rng = random.Random(3)
    games = []
    for k in range(120):
        a, b = rng.sample("abcd", 2)
        games += [
            RatedGame(players=s, places=rng.choice([(0, 1), (1, 0), (0, 0)]), cluster=f"{k}") for s in ((a, b), (b, a))
        ]
    tables = []
    for _ in range(3):
        rng.shuffle(games)
        tables.append(rate(games, bootstraps=20))
    assert tables[0] == tables[1] == tables[2]


def test_nash_averaging() -> None:
    third = 1 / 3
    assert nash_average([[0, 1, -1], [-1, 0, 1], [1, -1, 0]]) == pytest.approx([third] * 3)
    cloned = [[0, 1, -1, -1], [-1, 0, 1, 1], [1, -1, 0, 0], [1, -1, 0, 0]]
    assert nash_average(cloned) == pytest.approx([third, third, third / 2, third / 2], abs=1e-6)
    cycle = [[0, 1, -2], [-1, 0, 3], [2, -3, 0]]
    assert nash_average(cycle) == pytest.approx([3 / 6, 2 / 6, 1 / 6], abs=1e-6)
    ladder = [[0, -1, -1], [1, 0, -1], [1, 1, 0]]
    assert nash_average(ladder) == pytest.approx([0, 0, 1], abs=1e-6)
    assert nash_average([[0.0, 0.0], [0.0, 0.0]]) == pytest.approx([0.5, 0.5], abs=1e-4)
    with pytest.raises(ValueError, match="antisymmetric"):
        nash_average([[0, 1], [1, 0]])


def test_alpha_rank() -> None:
    rock_paper_scissors = [[0.0, -1.0, 1.0], [1.0, 0.0, -1.0], [-1.0, 1.0, 0.0]]
    assert alpha_rank(rock_paper_scissors) == pytest.approx([1 / 3] * 3)
    assert alpha_rank(rock_paper_scissors, alpha=1.0) == pytest.approx([1 / 3] * 3)
    assert alpha_rank([[0, -1, -1], [1, 0, -1], [1, 1, 0]]) == pytest.approx([0, 0, 1], abs=1e-9)


def test_alpha_rank_of_han_2013() -> None:
    """Commitment, cooperation, defection and two kinds of free riders."""
    reward, temptation, punishment, sucker, compensation, cost = 1.0, 2.0, 0.0, -1.0, 4.0, 0.25
    table = [
        [reward - cost / 2, reward - cost, 0, sucker + compensation - cost, reward - cost],
        [reward, reward, sucker, sucker, sucker],
        [0, temptation, punishment, punishment, punishment],
        [temptation - compensation, temptation, punishment, punishment, punishment],
        [reward, temptation, punishment, punishment, punishment],
    ]
    expected = [0.40966787, 0.07959841, 0.20506998, 0.08505983, 0.2206039]
    assert alpha_rank(table, alpha=0.1, population=20) == pytest.approx(expected, abs=1e-7)


def test_how_much_of_a_record_is_a_cycle() -> None:
    assert cyclic_share([[0, 1, -1], [-1, 0, 1], [1, -1, 0]]) == pytest.approx(1.0)
    ratings = [0.0, 0.5, 2.0]
    ladder = [[a - b for b in ratings] for a in ratings]
    assert cyclic_share(ladder) == pytest.approx(0.0)
    assert cyclic_share([[0.0, 0.0], [0.0, 0.0]]) == 0.0


def test_wilsons_interval_is_that_of_the_textbook() -> None:
    """10 of 20, and 0 of 10: values of Newcombe (1998) for the score method without correction of continuity."""
    assert wilson(10.0, 20) == pytest.approx((0.2993, 0.7007), abs=1e-4)
    assert wilson(0.0, 10) == pytest.approx((0.0, 0.2775), abs=1e-4)
