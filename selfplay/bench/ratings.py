"""``selfplay bench ratings``: are the intervals honest, how wide are they, and how long does a fit take?

    coverage_95               share of 95 % intervals that hold the truth: 5 players, 40 pairs per pairing, shared deals
    coverage_95_one_match     the same for two players and 40 pairs in all
    coverage_95_four_seats    the same for four seats, 40 deals per table in all rotations
    width_vs_reference        mean width of the intervals, against the same method written out plainly with scipy.optimize
    width_vs_bootstrap        against a percentile bootstrap over pairs
    width_vs_head_to_head     of two neighbours' difference, against the pentanomial interval of their direct match
    fit_s_1e5_games           seconds from 100,000 games to a table with intervals
    fit_s_vs_online           the same against one pass of online Elo updates in plain Python

The truth is known because the games are simulated. Every figure is over many simulated tournaments.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import numpy as np
from scipy import stats

from selfplay.bench.ratings_sim import World, centred, play_all, true_strengths
from selfplay.bench.report import Row
from selfplay.ratings.design import build_design
from selfplay.ratings.games import RatedGame
from selfplay.ratings.logit import fit
from selfplay.ratings.match import match_stats, pentanomial
from selfplay.ratings.table import rate

FIVE = World(strengths=(-0.8, -0.3, 0.0, 0.4, 0.7))
TWO = World(strengths=(-0.2, 0.2))
FOUR_SEATS = World(strengths=(-0.6, -0.2, 0.0, 0.3, 0.5), seats=4)
PAIRS = 40
BOOTSTRAPS = 200


def run(quick: bool) -> list[Row]:
    """The rows named above; ``quick`` simulates few tournaments."""
    num = 20 if quick else 1000
    rows = [
        Row(name=name, value=coverage(world, num, seed)[0], unit="share", repeats=num)
        for name, world, seed in (
            ("coverage_95", FIVE, 1), ("coverage_95_one_match", TWO, 2), ("coverage_95_four_seats", FOUR_SEATS, 3)
        )
    ]  # fmt: skip
    for name, (ours, theirs, reference) in widths(FIVE, 3 if quick else 40, 4).items():
        rows.append(
            Row(
                name=name,
                value=ours,
                unit="Elo" if "head" in name else "log",
                reference=reference,
                ratio=ours / theirs,
                repeats=3 if quick else 40,
            )
        )
    return rows + speed(5_000 if quick else 100_000)


def coverage(world: World, num: int, seed: int) -> tuple[float, float]:
    """(share of intervals that hold the truth, mean half width), of players' log strengths against the average."""
    rng, truth = np.random.default_rng(seed), true_strengths(world)
    held, width, total = 0, 0.0, 0
    for _ in range(num):
        estimate, half = intervals(world, play_all(world, PAIRS, rng))
        held += int((np.abs(estimate - truth) <= half).sum())
        width += float(half.sum())
        total += len(truth)
    return held / total, width / total


def intervals(world: World, games: Sequence[RatedGame]) -> tuple[Any, Any]:
    """(estimates, half widths) of centred log strengths, by the method of `rate`."""
    design = build_design(games, world.names)
    found = fit(design)
    contrasts = _contrasts(design.columns.player_column, design.columns.num)
    errors = np.sqrt(np.einsum("ip,pq,iq->i", contrasts, found.covariance, contrasts))
    return contrasts @ found.estimate, float(stats.t.ppf(0.975, found.degrees)) * errors


def widths(world: World, num: int, seed: int) -> dict[str, tuple[float, float, str]]:
    """Row → (our mean width, the reference's, what the reference is), on the same games."""
    rng = np.random.default_rng(seed)
    ours, plain, boot, gap, direct = 0.0, 0.0, 0.0, 0.0, 0.0
    for _ in range(num):
        games = play_all(world, PAIRS, rng)
        ours += float(2 * intervals(world, games)[1].mean())
        plain += float(2 * plain_half_widths(world, games).mean())
        boot += float(_bootstrap_widths(world, games).mean())
        mine, theirs = _neighbour_widths(world, games)
        gap, direct = gap + mine, direct + theirs
    return {
        "width_vs_reference": (ours / num, plain / num, "the method written out plainly"),
        "width_vs_bootstrap": (ours / num, boot / num, "percentile bootstrap over pairs"),
        "width_vs_head_to_head": (gap / num, direct / num, "pentanomial interval of the direct match"),
    }


def plain_half_widths(world: World, games: Sequence[RatedGame]) -> Any:
    """Davidson with a seat term by scipy.optimize, clustered sandwich with G/(G−1) and t quantiles, game by game."""
    from scipy import optimize

    n = len(world.names)
    index = {p: i for i, p in enumerate(world.names)}
    first = np.array([index[g.players[0]] for g in games])
    second = np.array([index[g.players[1]] for g in games])
    result = np.array([0 if g.places[0] < g.places[1] else 1 if g.places[0] > g.places[1] else 2 for g in games])
    at = np.arange(len(games))
    full = np.zeros((len(games), 3, n + 2))
    full[at, 0, first] = full[at, 1, second] = 1.0
    full[at, 2, first] += 0.5
    full[at, 2, second] += 0.5
    full[:, 0, n], full[:, 2, n], full[:, 2, n + 1] = 1.0, 0.5, 1.0
    rows = full[:, :, [*range(n - 1), n, n + 1]]  # log strengths but the last player's, the seat's, the draw's

    def parts(x: Any) -> tuple[Any, Any]:
        worth = rows @ x
        p = np.exp(worth - worth.max(axis=1, keepdims=True))
        return worth, p / p.sum(axis=1, keepdims=True)

    def loss(x: Any) -> tuple[float, Any]:
        _, p = parts(x)
        score = rows[at, result] - np.einsum("go,gop->gp", p, rows)
        return -float(np.log(p[at, result]).sum()), -score.sum(axis=0)

    x = optimize.minimize(loss, np.zeros(n + 1), jac=True, method="BFGS", options={"gtol": 1e-8}).x
    _, p = parts(x)
    mean = np.einsum("go,gop->gp", p, rows)
    bread = np.linalg.inv(np.einsum("go,gop,goq->pq", p, rows, rows) - mean.T @ mean)
    names = sorted({g.cluster for g in games})
    where = np.array([names.index(g.cluster) for g in games])
    sums = np.zeros((len(names), n + 1))
    np.add.at(sums, where, rows[at, result] - mean)
    covariance = bread @ (sums.T @ sums) @ bread * len(names) / (len(names) - 1)
    contrasts = _contrasts([*range(n - 1), None], n + 1)
    errors = np.sqrt(np.einsum("ip,pq,iq->i", contrasts, covariance, contrasts))
    return float(stats.t.ppf(0.975, len(names) - 1)) * errors


def _bootstrap_widths(world: World, games: Sequence[RatedGame]) -> Any:
    rng = np.random.default_rng(len(games))
    design = build_design(games, world.names)
    found = fit(design)
    clusters = design.taken.shape[0]
    boots = []
    for _ in range(BOOTSTRAPS):
        again = fit(design, rng.multinomial(clusters, [1 / clusters] * clusters).astype(float), found.estimate)
        boots.append(centred(design.columns.player_column, again.estimate))
    low, high = np.quantile(np.array(boots), [0.025, 0.975], axis=0)
    return high - low


def _neighbour_widths(world: World, games: Sequence[RatedGame]) -> tuple[float, float]:
    """Elo widths of the difference of the two middle players: from all games, and from their own match."""
    one, two = world.names[1], world.names[2]
    row = rate(games, anchors={two: 0.0}, bootstraps=0).of(one)
    pairs: dict[str, float] = {}
    for game in games:
        if set(game.players) == {one, two}:
            mine, theirs = (game.places[game.players.index(p)] for p in (one, two))
            pairs[game.cluster] = pairs.get(game.cluster, 0.0) + (mine < theirs) + 0.5 * (mine == theirs)
    counts = [sum(points == k / 2 for points in pairs.values()) for k in range(5)]
    return (row.high or 0.0) - (row.low or 0.0), 2 * (match_stats(pentanomial(counts)).elo_error or 0.0)


def speed(num_games: int) -> list[Row]:
    """How long a fit takes, beside online Elo."""
    world = World(strengths=tuple(np.linspace(-1, 1, 20)))
    per_pair = max(1, num_games // (2 * len(world.tables())))
    games = play_all(world, per_pair, np.random.default_rng(5))
    began = time.perf_counter()
    rate(games, bootstraps=0)
    took = time.perf_counter() - began
    began = time.perf_counter()
    _online(games)
    online = time.perf_counter() - began
    scaled = took * num_games / len(games)
    return [
        Row(name=f"fit_s_{num_games:.0e}_games".replace("e+0", "e"), value=scaled, unit="s"),
        Row(name="fit_s_vs_online", value=took, unit="s", reference="one pass of online Elo", ratio=took / online),
    ]


def _online(games: Sequence[RatedGame]) -> dict[str, float]:
    elo: dict[str, float] = {}
    for game in games:
        a, b = game.players
        score = 0.5 if game.places[0] == game.places[1] else float(game.places[0] < game.places[1])
        change = 32 * (score - 1 / (1 + 10 ** ((elo.get(b, 0.0) - elo.get(a, 0.0)) / 400)))
        elo[a], elo[b] = elo.get(a, 0.0) + change, elo.get(b, 0.0) - change
    return elo


def _contrasts(columns: Sequence[int | None], num: int) -> Any:
    """[n, P]: each player minus the average."""
    select = np.zeros((len(columns), num))
    for i, column in enumerate(columns):
        if column is not None:
            select[i, column] = 1.0
    return select - select.mean(axis=0)
