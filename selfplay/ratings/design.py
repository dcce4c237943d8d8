"""From games to choices: every model here is a multinomial logit over small sets of alternatives.

A finish is a row of choices: which entrant, or which tied set of entrants, came first among those that are left (Plackett and
Luce; ties after Davidson and Luce, in the form of Turner, van Etten, Firth and Kosmidis, 2020). A set S of entrants has the
worth ``delta_|S| * (product of the strengths in S) ** (1/|S|)``; with two seats this is Davidson (1970). The log strength of an
entrant is the mean of its players' ratings plus the mean of its seats' effects. So all parameters enter linearly.

In: games. Out: a `Design`: alternatives as sparse rows, the choices they belong to, and how often each was taken, by cluster.
Equal situations are counted, not repeated, and everything is sorted: the order of the games changes nothing at all.
"""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from selfplay.ratings.games import RatedGame

Entrant = tuple[tuple[int, ...], tuple[int, ...]]
"""(players, seats) of one side, as indices."""
Situation = tuple[Entrant, ...]
_DENSE = 1_000_000
"""Matrices of up to so many entries are held dense: they are quicker then."""


@dataclass(frozen=True)
class Columns:
    """Which parameter stands in which column. A player without a column has rating 0: it is the reference of its group."""

    players: tuple[str, ...]
    player_column: tuple[int | None, ...]
    seat_column: tuple[int | None, ...]
    group: tuple[int, ...]
    """Per player, which connected group it is in."""
    tie_column: tuple[int, ...]
    """Column of log delta for ties of 2, 3, ... entrants."""
    num: int


@dataclass(frozen=True)
class Design:
    """A alternatives in C choices, P parameters, G clusters."""

    columns: Columns
    rows: Any
    """[A, P]: the alternatives; sparse when there are many."""
    choice: Any
    """[A]: which choice each alternative belongs to; non-decreasing."""
    taken: Any
    """[G, A] sparse: how often each alternative was taken."""
    starts: Any
    """[C]: first alternative of each choice."""


def build_design(games: Sequence[RatedGame], players: Sequence[str], *, seat_effects: bool = True) -> Design:
    """The choices in ``games`` among ``players`` (sorted by name by the caller). Mirror games must be left out before."""
    index = {p: i for i, p in enumerate(players)}
    counts: dict[str, Counter[tuple[Situation, Situation]]] = defaultdict(Counter)
    largest_tie = 1
    num_seats = max((len(g.players) for g in games), default=2)
    choices = _Choices(index)
    for game in games:
        for situation, first in choices.of(game):
            counts[game.cluster][situation, first] += 1
            largest_tie = max(largest_tie, len(first))
    columns = _columns(games, players, num_seats if seat_effects else 0, largest_tie)
    situations = sorted({situation for counter in counts.values() for situation, _ in counter})
    return _assemble(columns, situations, counts, largest_tie)


class _Choices:
    """Remembers how a finish falls into choices: most games repeat an earlier one."""

    def __init__(self, index: dict[str, int]) -> None:
        self._index = index
        self._known: dict[tuple[Any, ...], list[tuple[Situation, Situation]]] = {}

    def of(self, game: RatedGame) -> list[tuple[Situation, Situation]]:
        key = (game.players, game.places, game.teams)
        found = self._known.get(key)
        if found is None:
            found = self._known[key] = list(self._split(game))
        return found

    def _split(self, game: RatedGame) -> list[tuple[Situation, Situation]]:
        levels: dict[int, list[Entrant]] = defaultdict(list)
        for place, entrant in _entrants(game, self._index):
            levels[place].append(entrant)
        groups = [tuple(sorted(levels[place])) for place in sorted(levels)]
        out = []
        for i, group in enumerate(groups):
            left = tuple(sorted(itertools.chain.from_iterable(groups[i:])))
            if len(left) > 1:
                out.append((left, group))
        return out


def _entrants(game: RatedGame, index: dict[str, int]) -> list[tuple[int, Entrant]]:
    teams = game.teams or tuple(range(len(game.players)))
    members: dict[int, list[int]] = defaultdict(list)
    for seat, team in enumerate(teams):
        members[team].append(seat)
    return [
        (game.places[seats[0]], (tuple(index[game.players[s]] for s in seats), tuple(seats)))
        for seats in members.values()
    ]


def connected_groups(games: Sequence[RatedGame], players: Sequence[str]) -> list[list[str]]:
    """Players that met each other, directly or through others; sorted, the largest group first. Who never played is alone."""
    parent = {p: p for p in players}

    def root(p: str) -> str:
        while parent[p] != p:
            parent[p] = parent[parent[p]]
            p = parent[p]
        return p

    for names in {frozenset(g.players) for g in games}:
        first, *rest = sorted(names)
        for other in rest:
            parent[root(other)] = root(first)
    groups: dict[str, list[str]] = defaultdict(list)
    for p in sorted(players):
        groups[root(p)].append(p)
    return sorted(groups.values(), key=lambda g: (-len(g), g))


def _columns(games: Sequence[RatedGame], players: Sequence[str], num_seats: int, largest_tie: int) -> Columns:
    groups = connected_groups(games, players)
    references = {group[0] for group in groups}
    group_of = {p: i for i, group in enumerate(groups) for p in group}
    at = 0
    player_column: list[int | None] = []
    for p in players:
        player_column.append(None if p in references else at)
        at += p not in references
    seat_column = [None if seat == num_seats - 1 else at + seat for seat in range(num_seats)]
    at += max(0, num_seats - 1)
    ties = tuple(at + k for k in range(largest_tie - 1))
    return Columns(
        players=tuple(players), player_column=tuple(player_column), seat_column=tuple(seat_column),
        group=tuple(group_of[p] for p in players), tie_column=ties, num=at + len(ties),
    )  # fmt: skip


def _assemble(
    columns: Columns,
    situations: Sequence[Situation],
    counts: dict[str, Counter[tuple[Situation, Situation]]],
    largest_tie: int,
) -> Design:
    import numpy as np
    from scipy import sparse

    rows: list[dict[int, float]] = []
    choice: list[int] = []
    place: dict[tuple[Situation, Situation], int] = {}
    for number, situation in enumerate(situations):
        for size in range(1, min(largest_tie, len(situation)) + 1):
            for subset in itertools.combinations(situation, size):
                place[situation, subset] = len(rows)
                rows.append(_row(columns, subset))
                choice.append(number)
    at_row = [i for i, row in enumerate(rows) for _ in row]
    at_column = [c for row in rows for c in row]
    entries = [v for row in rows for v in row.values()]
    clusters = sorted(counts)
    took = [(g, place[key], n) for g, name in enumerate(clusters) for key, n in sorted(counts[name].items())]
    g_index, a_index, numbers = zip(*took, strict=True) if took else ((), (), ())
    matrix: Any = sparse.csr_array((entries, (at_row, at_column)), shape=(len(rows), columns.num))
    belongs: Any = np.array(choice, dtype=np.int64)
    return Design(
        columns=columns,
        rows=matrix.toarray() if len(rows) * columns.num <= _DENSE else matrix,
        choice=belongs,
        starts=np.flatnonzero(np.r_[True, belongs[1:] != belongs[:-1]]) if len(belongs) else belongs,
        taken=sparse.csr_array((np.array(numbers, float), (g_index, a_index)), shape=(len(clusters), len(rows))),
    )


def _row(columns: Columns, subset: Situation) -> dict[int, float]:
    row: dict[int, float] = defaultdict(float)
    for players, seats in subset:
        for column in (columns.player_column[p] for p in players):
            if column is not None:
                row[column] += 1.0 / len(players) / len(subset)
        for column in (columns.seat_column[s] for s in seats) if columns.seat_column else ():
            if column is not None:
                row[column] += 1.0 / len(seats) / len(subset)
    if len(subset) > 1:
        row[columns.tie_column[len(subset) - 2]] += 1.0
    return dict(row)
