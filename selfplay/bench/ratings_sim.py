"""Simulated tournaments with known strengths: shared deals that favour a seat, draws, seat rotations.

In: a generator and a `World`. Out: games, and the ratings that infinitely many of them would give: with shared deals the fitted
model is not the simulated one, so the truth is what its fit converges to, found from the expected results.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
import numpy as np

from selfplay.ratings.design import build_design
from selfplay.ratings.games import RatedGame
from selfplay.ratings.logit import fit

_NODES, _WEIGHTS = np.polynomial.hermite_e.hermegauss(21)


class World(msgspec.Struct, frozen=True, kw_only=True):
    """Who plays. ``seat`` and ``deal`` act on the first seat's log strength: always, and by a normal draw per deal."""

    strengths: tuple[float, ...]
    seat: float = 0.4
    deal: float = 0.8
    tie: float = -0.7
    """Log of Davidson's draw parameter; -inf: no draws."""
    seats: int = 2

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(f"p{i}" for i in range(len(self.strengths)))

    def tables(self) -> list[tuple[int, ...]]:
        """Every set of players that can sit together."""
        return list(itertools.combinations(range(len(self.strengths)), self.seats))


def rotations(table: Sequence[int]) -> list[tuple[int, ...]]:
    """Every seating in which the players keep their order around the table."""
    return [(*table[k:], *table[:k]) for k in range(len(table))]


def play_all(world: World, clusters_per_table: int, rng: Any) -> list[RatedGame]:
    """One tournament: each deal once in every rotation of the seats."""
    games = []
    for table in world.tables():
        for number in range(clusters_per_table):
            deal = rng.normal() * world.deal
            for seating in rotations(table):
                places = _finish(world, seating, deal, rng)
                games.append(_game(world, seating, places, f"{table}-{number}"))
    return games


def true_strengths(world: World) -> Any:
    """[n] what the fit converges to, centred."""
    games: list[RatedGame] = []
    weights: list[float] = []
    for table in world.tables():
        for seating in rotations(table):
            for node, weight in zip(_NODES, _WEIGHTS, strict=True):
                for places, p in _outcomes(world, seating, node * world.deal):
                    games.append(_game(world, seating, places, f"{len(games):07d}"))
                    weights.append(weight * p)
    design = build_design(games, world.names)
    found = fit(design, np.array(weights) * 1e3)
    return centred(design.columns.player_column, found.estimate)


def centred(columns: Sequence[int | None], estimate: Any) -> Any:
    """Log strengths of all players, their mean taken off."""
    values = np.array([0.0 if c is None else estimate[c] for c in columns])
    return values - values.mean()


def _game(world: World, seating: Sequence[int], places: tuple[int, ...], cluster: str) -> RatedGame:
    return RatedGame(players=tuple(world.names[i] for i in seating), places=places, cluster=cluster)


def _worth(world: World, seating: Sequence[int], deal: float) -> list[float]:
    return [world.strengths[i] + (world.seat + deal if seat == 0 else 0.0) for seat, i in enumerate(seating)]


def _outcomes(world: World, seating: Sequence[int], deal: float) -> Iterator[tuple[tuple[int, ...], float]]:
    """(places, probability) of every finish."""
    worth = _worth(world, seating, deal)
    if len(seating) == 2:
        masses = [math.exp(worth[0]), math.exp(worth[1]), math.exp(world.tie + sum(worth) / 2)]
        for places, mass in zip(((0, 1), (1, 0), (0, 0)), masses, strict=True):
            yield places, mass / sum(masses)
        return
    for order in itertools.permutations(range(len(seating))):
        p, left = 1.0, list(order)
        while left:
            p *= math.exp(worth[left[0]]) / sum(math.exp(worth[k]) for k in left)
            left.pop(0)
        yield tuple(order.index(k) for k in range(len(seating))), p


def _finish(world: World, seating: Sequence[int], deal: float, rng: Any) -> tuple[int, ...]:
    if len(seating) > 2:
        times = rng.exponential(size=len(seating)) / np.exp(_worth(world, seating, deal))
        return tuple(int(k) for k in np.argsort(np.argsort(times)))
    places, masses = zip(*_outcomes(world, seating, deal), strict=True)
    finish: tuple[int, ...] = places[int(rng.choice(3, p=masses))]
    return finish
