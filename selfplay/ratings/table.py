"""The rating table: strengths, Elo with intervals, rank ranges, the seat's edge, and what must be said about the record.

In: games. Out: a `RatingTable`. Elo is shown on the scale of the seat-balanced expected score: a player's Elo is that of its
expected score against the anchor (or against the field's average), each pair of seats played both ways. Numbers are always
finite; what a record cannot tell is said in ``remarks`` and in each player's ``flags``.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from selfplay.ratings.design import Columns, Design, build_design, connected_groups
from selfplay.ratings.games import RatedGame
from selfplay.ratings.logit import Fit, Profile, fit

CONFIDENCE = 0.95
BOOTSTRAPS = 200
_SPAN = 60.0


class PlayerRating(msgspec.Struct, frozen=True, kw_only=True):
    """One player. ``elo``, ``low`` and ``high`` are None for a player without games."""

    player: str
    elo: float | None
    low: float | None
    high: float | None
    bootstrap_low: float | None
    bootstrap_high: float | None
    strength: float | None
    """Log strength, relative to the reference of the scale."""
    rank_low: int
    """Best rank that is compatible with the record, and the worst one."""
    rank_high: int
    games: int
    wins: float
    """First places, shared ones by share."""
    score: float | None
    """Mean over games and opponents: 1 ahead, 1/2 level, 0 behind."""
    flags: tuple[str, ...] = ()


class RatingTable(msgspec.Struct, frozen=True, kw_only=True):
    """All players, the best first; groups that never met are ranked each by itself."""

    players: tuple[PlayerRating, ...]
    groups: tuple[tuple[str, ...], ...]
    """Players that can be compared with each other; the largest group first."""
    seat_effects: tuple[float, ...]
    """Elo that a seat is worth against the last one, between equals."""
    seat_low: tuple[float, ...]
    seat_high: tuple[float, ...]
    draw_share: float
    num_games: int
    num_clusters: int
    reference: str
    """What Elo 0 (or the anchor's value) stands for."""
    tied_with_best: tuple[str, ...]
    """Players not told apart from the first one at this confidence."""
    confidence: float
    remarks: tuple[str, ...]

    def of(self, player: str) -> PlayerRating:
        """The row of ``player``; KeyError when it is not there."""
        return {p.player: p for p in self.players}[player]


def rate(
    games: Sequence[RatedGame],
    *,
    players: Sequence[str] = (),
    anchors: Mapping[str, float] | None = None,
    confidence: float = CONFIDENCE,
    bootstraps: int = BOOTSTRAPS,
    seat_effects: bool = True,
) -> RatingTable:
    """Rate everybody in ``games`` and ``players``. Mirror games are left out, and said to be."""
    useful = [g for g in games if not g.is_mirror]
    names = sorted({p for g in games for p in g.players} | set(players))
    design = build_design(useful, names, seat_effects=seat_effects)
    found = fit(design)
    if confounded := bool(found.confounded) and seat_effects:
        design = build_design(useful, names, seat_effects=False)
        found = fit(design)
    scale = _Scale(design, found, {a: v for a, v in (anchors or {}).items() if a in names}, confidence, useful)
    boots = _bootstrap(design, found, bootstraps)
    groups = connected_groups(useful, names)
    records = _records(useful)
    rows = [_player_row(p, scale, boots, groups, records.get(p, {})) for p in names]
    order = {p: i for i, p in enumerate(p for group in groups for p in group)}
    group_of = {p: i for i, group in enumerate(groups) for p in group}
    rows.sort(key=lambda r: (group_of[r.player], -(r.strength or 0.0), order[r.player]))
    seats, low, high = scale.seats()
    return RatingTable(
        players=tuple(rows), groups=tuple(map(tuple, groups)), seat_effects=seats, seat_low=low, seat_high=high,
        draw_share=_draw_share(useful), num_games=len(useful), num_clusters=len({g.cluster for g in useful}),
        reference=scale.reference, tied_with_best=tuple(r.player for r in rows[1:] if r.rank_low == 1 and r.games),
        confidence=confidence, remarks=_remarks(games, useful, found, groups, scale, confounded),
    )  # fmt: skip


class _Scale:
    """From parameters to Elo."""

    def __init__(
        self, design: Design, found: Fit, anchors: Mapping[str, float], confidence: float, games: Sequence[RatedGame]
    ) -> None:
        import numpy as np
        from scipy import stats

        self.columns: Columns = design.columns
        self.found, self.anchors = found, anchors
        self.quantile = float(stats.t.ppf(0.5 + confidence / 2, found.degrees))
        self._profile = Profile(design, found, self.quantile) if found.separated and design.columns.num else None
        self.played = {p for players in {g.players for g in games} for p in players}
        self._num_seats = max(2, len(self.columns.seat_column))
        self._np = np
        self._orders: dict[tuple[str, str], int] = {}
        known = [a for a in anchors if a in self.played]
        self.reference = ", ".join(f"{a} = {anchors[a]:g}" for a in sorted(known)) or "the players' average = 0"

    def contrast(self, player: str, against: str | None = None) -> Any:
        """[P]: weights of ``player`` minus ``against`` (None: the reference of its group)."""
        out = self._np.zeros(self.columns.num)
        self._add(out, player, 1.0)
        if against is not None:
            self._add(out, against, -1.0)
            return out
        base = self.base_of(player)
        for other in base:
            self._add(out, other, -1.0 / len(base))
        return out

    def base_of(self, player: str) -> list[str]:
        """Who the scale of ``player``'s group is set by: its anchors, or all of it."""
        index = self.columns.players.index(player)
        group = [
            p for p, g in zip(self.columns.players, self.columns.group, strict=True) if g == self.columns.group[index]
        ]
        return [p for p in group if p in self.anchors] or group

    def base_elo(self, player: str) -> float:
        values = [self.anchors[p] for p in self.base_of(player) if p in self.anchors]
        return sum(values) / len(values) if values else 0.0

    def _add(self, out: Any, player: str, weight: float) -> None:
        column = self.columns.player_column[self.columns.players.index(player)]
        if column is not None:
            out[column] += weight

    def difference(self, contrast: Any) -> tuple[float, float, float]:
        """(difference of log strengths, the ends of its interval)."""
        value = float(contrast @ self.found.estimate)
        if self._profile is not None:
            return value, *self._profile.interval(contrast)
        half = self._half(contrast)
        return value, value - half, value + half

    def order(self, player: str, other: str) -> int:
        """1 or -1 when ``player`` is surely stronger or weaker than ``other``, else 0."""
        if (other, player) not in self._orders:
            contrast = self.contrast(player, other)
            value = float(contrast @ self.found.estimate)
            if self._profile is not None:
                clear = self._profile.excludes(contrast, 0.0)
            else:
                clear = abs(value) > self._half(contrast)
            self._orders[player, other] = int(math.copysign(1, value)) if clear else 0
            return self._orders[player, other]
        return -self._orders[other, player]

    def _half(self, contrast: Any) -> float:
        return self.quantile * math.sqrt(max(0.0, float(contrast @ self.found.covariance @ contrast)))

    def elo(self, difference: float) -> float:
        """Elo of the seat-balanced expected score of who is ``difference`` stronger in log strength."""
        seats = [self.found.estimate[c] if c is not None else 0.0 for c in self.columns.seat_column] or [0.0, 0.0]
        tie = math.exp(float(self.found.estimate[self.columns.tie_column[0]])) if self.columns.tie_column else 0.0
        pairs = [(a, b) for i, a in enumerate(seats) for j, b in enumerate(seats) if i != j]
        ahead = behind = 0.0
        for mine, theirs in pairs:
            gap = max(-_SPAN, min(_SPAN, difference + mine - theirs))
            a, b = math.exp(gap / 2), math.exp(-gap / 2)
            total = a + b + tie
            ahead += (a + tie / 2) / total
            behind += (b + tie / 2) / total
        return 400.0 * math.log10(ahead / behind)

    def seats(self) -> tuple[tuple[float, ...], tuple[float, ...], tuple[float, ...]]:
        """(Elo of each seat against the last, low, high)."""
        value: list[float] = []
        low: list[float] = []
        high: list[float] = []
        for column in self.columns.seat_column:
            if column is None:
                value, low, high = [*value, 0.0], [*low, 0.0], [*high, 0.0]
                continue
            at = float(self.found.estimate[column])
            half = self.quantile * math.sqrt(max(0.0, float(self.found.covariance[column, column])))
            for out, x in ((value, at), (low, at - half), (high, at + half)):
                out.append(self._plain(x))
        return tuple(value), tuple(low), tuple(high)

    def _plain(self, gap: float) -> float:
        """Elo of a gap in log strength in one seating."""
        tie = math.exp(float(self.found.estimate[self.columns.tie_column[0]])) if self.columns.tie_column else 0.0
        gap = max(-_SPAN, min(_SPAN, gap))
        a, b = math.exp(gap / 2) + tie / 2, math.exp(-gap / 2) + tie / 2
        return 400.0 * math.log10(a / b)


Finish = tuple[tuple[str, ...], tuple[int, ...]]
"""(players, places): how one game ended, as often as it did."""


def _records(games: Sequence[RatedGame]) -> dict[str, dict[Finish, int]]:
    """Player → how its games ended, and how often."""
    out: dict[str, dict[Finish, int]] = {}
    for finish, number in Counter((g.players, g.places) for g in games).items():
        for player in set(finish[0]):
            out.setdefault(player, {})[finish] = number
    return out


def _player_row(
    player: str, scale: _Scale, boots: Any, groups: Sequence[Sequence[str]], mine: Mapping[Finish, int]
) -> PlayerRating:
    import numpy as np

    group = next(g for g in groups if player in g)
    if not mine:
        return PlayerRating(
            player=player, elo=None, low=None, high=None, bootstrap_low=None, bootstrap_high=None, strength=None,
            rank_low=1, rank_high=1, games=0, wins=0.0, score=None, flags=("no games",),
        )  # fmt: skip
    contrast = scale.contrast(player)
    value, lowest, highest = scale.difference(contrast)
    base = scale.base_elo(player)
    boot = np.quantile(boots @ contrast, [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2]) if len(boots) else (None, None)
    low, high = _rank_range(player, group, scale)
    wins, score = _tally(player, mine)
    return PlayerRating(
        player=player, elo=base + scale.elo(value) + 0.0, low=base + scale.elo(lowest), high=base + scale.elo(highest),
        bootstrap_low=None if boot[0] is None else base + scale.elo(float(boot[0])),
        bootstrap_high=None if boot[1] is None else base + scale.elo(float(boot[1])),
        strength=value, rank_low=low, rank_high=high, games=sum(mine.values()), wins=wins, score=score,
        flags=_flags(player, scale, mine, groups),
    )  # fmt: skip


def _rank_range(player: str, group: Sequence[str], scale: _Scale) -> tuple[int, int]:
    """Ranks within the group that pairwise comparisons leave open."""
    better = worse = 0
    for other in group:
        if other == player or other not in scale.played:
            continue
        sign = scale.order(player, other)
        better += sign < 0
        worse += sign > 0
    size = sum(p in scale.played for p in group)
    return 1 + better, size - worse


def _flags(player: str, scale: _Scale, mine: Mapping[Finish, int], groups: Sequence[Sequence[str]]) -> tuple[str, ...]:
    flags = []
    if scale.found.separated:
        decided = [(places[players.index(player)], places) for players, places in mine if len(set(places)) > 1]
        if len(decided) == len(mine) and all(p == min(places) for p, places in decided):
            flags.append("won every game: no upper bound")
        elif len(decided) == len(mine) and all(p == max(places) for p, places in decided):
            flags.append("lost every game: no lower bound")
        elif sum(map(len, groups)) == 2 and decided:  # where others draw and lose, a draw does bound who drew it
            ahead = {places[players.index(player)] == min(places) for players, places in mine if len(set(places)) > 1}
            flags += ["never lost: no upper bound"] if ahead == {True} else []
            flags += ["never won: no lower bound"] if ahead == {False} else []
    if len(groups) > 1 and player not in groups[0]:
        flags.append("never met the main group")
    return tuple(flags)


def _tally(player: str, mine: Mapping[Finish, int]) -> tuple[float, float]:
    """(first places, mean score against those at the table)."""
    wins = score = 0.0
    for (players, places), number in mine.items():
        own = [p for p, name in zip(places, players, strict=True) if name == player]
        others = [p for p, name in zip(places, players, strict=True) if name != player]
        best = min(places)
        wins += number * sum(p == best for p in own) / sum(p == best for p in places)
        ahead = sum(1.0 if p < o else 0.5 if p == o else 0.0 for p in own for o in others)
        score += number * ahead / (len(own) * len(others))
    return wins, score / sum(mine.values())


def _bootstrap(design: Design, found: Fit, num: int) -> Any:
    """[B, P]: estimates from resampled clusters; none when the record needs a prior or has too few clusters."""
    import numpy as np

    clusters = int(design.taken.shape[0])
    if found.separated or clusters < 5 or not design.columns.num:
        return np.zeros((0, design.columns.num))
    rng = np.random.default_rng(0)
    out = []
    for _ in range(num):
        again = fit(design, rng.multinomial(clusters, [1.0 / clusters] * clusters).astype(float), found.estimate)
        if not again.separated:
            out.append(again.estimate)
    return np.array(out).reshape(-1, design.columns.num)


def _draw_share(games: Sequence[RatedGame]) -> float:
    return sum(len(set(g.places)) == 1 for g in games) / len(games) if games else 0.0


def _remarks(
    games: Sequence[RatedGame],
    useful: Sequence[RatedGame],
    found: Fit,
    groups: Sequence[Sequence[str]],
    scale: _Scale,
    confounded: bool,
) -> tuple[str, ...]:
    """What a reader must know before believing the numbers."""
    out = []
    if not useful:
        return ("no games between different players: nothing can be rated",)
    if mirrors := len(games) - len(useful):
        out.append(f"{mirrors} games of a player against itself are not rated")
    if len({g.cluster for g in useful}) == 1:
        out.append("one pair of games only: the interval is the model's, not the data's")
    met = [g for g in groups if any(p in scale.played for p in g)]
    if len(met) > 1:
        told = "; ".join(", ".join(g) for g in met)
        out.append(f"{len(met)} groups never met, so they cannot be compared: {told}")
    if missing := sorted(p for g in groups for p in g if p not in scale.played):
        out.append(f"without games: {', '.join(missing)}")
    if found.degenerate:
        out.append(
            "the two games of every pair cancelled out: nothing varied, so intervals are the model's, not the data's"
        )
    if found.separated:
        out.append(_separation(useful, found, scale))
    if confounded:
        out.append("players kept to their seats: what is the player's and what is the seat's cannot be told apart")
    return tuple(out)


def _separation(games: Sequence[RatedGame], found: Fit, scale: _Scale) -> str:
    """Why there is no finite estimate without a prior, in words."""
    if all(len(set(g.places)) == 1 for g in games):
        what = "every game was drawn"
    elif len({g.places for g in games}) == 1 and len(games) > 1 and len({g.players for g in games}) > 1:
        what = "the same seat won every game, whoever sat there"
    else:
        columns = [c for c in scale.columns.player_column if c in found.free]
        what = "some players never lost, or never won" if columns else "a seat or a tie never failed to decide"
    return f"{what}: strengths have no finite estimate; shown under a weak prior, intervals by the likelihood's profile"
