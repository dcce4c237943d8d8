"""Which game is next. Everything is a function of the spec and the games so far, so a resumed tournament goes on as it would have.

``round-robin`` and ``gauntlet`` are lists. ``swiss`` pairs neighbours in the standings, round by round. ``active`` plays the table
that, per token, most shrinks the variance of the comparison asked for (by default between the two leaders).
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Sequence
from typing import Any

from selfplay.ratings.design import build_design
from selfplay.ratings.logit import fit
from selfplay.tournament.gamelog import GameLine
from selfplay.tournament.spec import Game, TournamentSpec, units

Unit = tuple[tuple[str, ...], int]
FIRST_PAIRS = 2
"""Deals at every table before `active` begins to choose."""


class Scheduler:
    """Hands out games that were neither played nor handed out. ``lines`` is the live record."""

    def __init__(self, spec: TournamentSpec, lines: dict[str, GameLine]) -> None:
        self._spec, self._lines = spec, lines
        self._given: set[str] = set(lines)
        self._queue: deque[Game] = deque()
        self._units = iter(units(spec)) if spec.schedule in ("round-robin", "gauntlet") else None
        self._names = [p.name for p in spec.players]
        self._tables = spec.tables()
        self._round = 0
        self._planned: Counter[tuple[str, ...]] = Counter()
        self._round_games: set[str] = set()
        self._pending: list[Unit] = []
        if spec.schedule == "active":
            self._go_on()

    @property
    def num_planned(self) -> int:
        """Games in all when nothing stops it early."""
        spec = self._spec
        if spec.schedule == "swiss":
            tables = len(self._names) // len(spec.seats)
            return spec.pairs * tables * len(spec.seats)
        return spec.pairs * sum(len(spec.table_games(t, 0)) for t in self._tables)

    def next(self) -> Game | None:
        """The next game to start now; None when there is none (wait for results, or all are played)."""
        while not self._queue:
            unit = self._next_unit()
            if unit is None:
                return None
            games = self._spec.table_games(*unit)
            self._queue.extend(g for g in games if g.id not in self._given)
        game = self._queue.popleft()
        self._given.add(game.id)
        return game

    def _next_unit(self) -> Unit | None:
        if self._units is not None:
            return next(self._units, None)
        return self._next_swiss() if self._spec.schedule == "swiss" else self._next_active()

    # ── swiss ────────────────────────────────────────────────────────────────────────────────────

    def _next_swiss(self) -> Unit | None:
        if not self._pending:
            if self._round >= self._spec.pairs or not self._round_games <= set(self._lines):
                return None
            self._pending = [(t, self._round) for t in self._swiss_tables()]
            self._round_games = {g.id for u in self._pending for g in self._spec.table_games(*u)}
            self._round += 1
        return self._pending.pop(0) if self._pending else None

    def _swiss_tables(self) -> list[tuple[str, ...]]:
        """Neighbours in the standings of the rounds before, avoiding tables that met; who is left over sits out."""
        before = [line for line in self._lines.values() if line.pair < self._round]
        scores: dict[str, float] = dict.fromkeys(self._names, 0.0)
        for line in before:
            for player in line.seats.values():
                scores[player] += _score(line, player)
        met = Counter(frozenset(line.table) for line in before)
        played = Counter(name for _, name in {(line.pair, name) for line in before for name in line.table})
        left = sorted(self._names, key=lambda n: (played[n], -scores[n], self._names.index(n)))
        playing = left[: len(left) // len(self._spec.seats) * len(self._spec.seats)]
        order = sorted(playing, key=lambda n: (-scores[n], self._names.index(n)))
        return _neighbours(order, len(self._spec.seats), met)

    def _go_on(self) -> None:
        """What an earlier session chose stays chosen; its deals are completed first."""
        for line in self._lines.values():
            self._planned[line.table] = max(self._planned[line.table], line.pair + 1)
        for table, num in self._planned.items():
            for pair in range(num):
                self._queue.extend(g for g in self._spec.table_games(table, pair) if g.id not in self._given)

    # ── active ───────────────────────────────────────────────────────────────────────────────────

    def _next_active(self) -> Unit | None:
        total = self._spec.pairs * len(self._tables)
        if sum(self._planned.values()) >= total:
            return None
        waiting = [t for t in self._tables if self._planned[t] < FIRST_PAIRS]
        table = waiting[0] if waiting else self._best_table()
        unit = (table, self._planned[table])
        self._planned[table] += 1
        return unit

    def _best_table(self) -> tuple[str, ...]:
        """The table whose next deal takes most off the variance of the comparison, per token it costs."""
        import numpy as np

        games = [line.rated() for line in self._lines.values() if line.scored]
        useful = [g for g in games if not g.is_mirror]
        if not useful:
            return min(self._tables, key=lambda t: self._planned[t])
        design = build_design(useful, sorted(self._names), seat_effects=False)
        found = fit(design)
        contrast = self._contrast(design, found)
        precision = np.linalg.pinv(found.covariance + 1e-9 * np.eye(len(found.covariance)), hermitian=True)
        costs = self._costs()

        def gain(table: tuple[str, ...]) -> float:
            more = np.zeros_like(precision)
            for i, a in enumerate(table):
                for b in table[i + 1 :]:
                    row = self._row(design, a, b)
                    p = 1.0 / (1.0 + np.exp(-float(row @ found.estimate)))
                    more += len(self._spec.seats) * p * (1 - p) * np.outer(row, row)
            before = contrast @ found.covariance @ contrast
            after = contrast @ np.linalg.pinv(precision + more, hermitian=True) @ contrast
            return float(before - after) / costs[table]

        return max(self._tables, key=lambda t: (gain(t), -self._planned[t]))

    def _contrast(self, design: Any, found: Any) -> Any:
        names = design.columns.players
        value = {
            n: 0.0 if c is None else float(found.estimate[c])
            for n, c in zip(names, design.columns.player_column, strict=True)
        }
        pair: Sequence[str] = self._spec.compare or sorted(names, key=lambda n: -value[n])[:2]
        return self._row(design, pair[0], pair[1])

    def _row(self, design: Any, a: str, b: str) -> Any:
        import numpy as np

        row = np.zeros(design.columns.num)
        for name, sign in ((a, 1.0), (b, -1.0)):
            column = design.columns.player_column[design.columns.players.index(name)]
            if column is not None:
                row[column] += sign
        return row

    def _costs(self) -> dict[tuple[str, ...], float]:
        """Mean tokens of a deal at each table (turns where no model plays)."""
        spent: dict[tuple[str, ...], list[int]] = defaultdict(list)
        for line in self._lines.values():
            spent[line.table].append(line.tokens or line.turns)
        everything = [c for costs in spent.values() for c in costs]
        mean = sum(everything) / len(everything) if everything else 1.0
        return {t: max(1.0, sum(spent[t]) / len(spent[t]) if t in spent else mean) for t in self._tables}


def _score(line: GameLine, player: str) -> float:
    """Share of the point: 1 for a sole winner, 1/2 for a draw of two."""
    if not line.scored:
        return 0.0
    game = line.rated()
    best = [p for p, place in zip(game.players, game.places, strict=True) if place == min(game.places)]
    return best.count(player) / len(best)


def _neighbours(order: Sequence[str], size: int, met: Counter[frozenset[str]]) -> list[tuple[str, ...]]:
    """Groups of ``size`` in the order of the standings, as few of them as can be made of players who met before."""
    return _pairs(order, met) if size == 2 else _groups(order, size, met)


def _pairs(order: Sequence[str], met: Counter[frozenset[str]]) -> list[tuple[str, ...]]:
    """The fewest repeated meetings over the whole round, then the smallest distances in the standings."""
    import networkx

    graph = networkx.Graph()
    repeat = len(order) ** 3  # outweighs all squared distances of a round together
    for i, name in enumerate(order):
        for j, other in enumerate(order[:i]):
            graph.add_edge(other, name, weight=repeat * met[frozenset((name, other))] + (i - j) ** 2)
    pairs = [tuple(sorted(pair, key=order.index)) for pair in networkx.min_weight_matching(graph)]
    return sorted(pairs, key=lambda pair: order.index(pair[0]))


def _groups(order: Sequence[str], size: int, met: Counter[frozenset[str]]) -> list[tuple[str, ...]]:
    """From the top down; of those who could complete a group, the one who met it least comes first. The last may have no choice."""
    left, out = list(order), []
    while left:
        group = [left.pop(0)]
        while len(group) < size:
            partner = min(left, key=lambda n: (_times_met(met, group, n), left.index(n)))
            left.remove(partner)
            group.append(partner)
        out.append(tuple(sorted(group, key=order.index)))
    return out


def _times_met(met: Counter[frozenset[str]], group: Iterable[str], name: str) -> int:
    together = {*group, name}
    return sum(n for table, n in met.items() if together <= table)
