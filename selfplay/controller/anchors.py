"""How the current versions do against players that never change: games played between training games, by the same workers.

    every eval.every steps:  eval.games matches per anchor and trained seat ──► pool ──► results, put aside by the collector
                             ──► shares of games won, drawn and lost, and the points of both together with their interval

These games are counted nowhere else: they are not stored, not trained on, in no baseline and in no rating. Their seeds are
the same at every evaluation. One that infrastructure spoilt is played again; one that fails otherwise is said and counted.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Sequence

import msgspec

from selfplay.agent import Sampling
from selfplay.controller.waits import Waits
from selfplay.errors import ConfigError, UserError, WorkerError, suggestion
from selfplay.league import Matchmaker
from selfplay.play import sit_down
from selfplay.pool import EpisodeResult, FailedResult, PoolSupervisor
from selfplay.ratings.shares import wilson
from selfplay.registry import make_environment
from selfplay.types import BASE, Episode, Match, SeatAssignment, derive_seed

FIRST_INDEX, END_INDEX = 1 << 40, 1 << 60
"""Matches with numbers from the one and below the other are games of evaluations."""
MAX_ATTEMPTS = 3
NO_ANCHORS = ("llm", "human", "api")
Pairing = tuple[str, str]
"""Anchor, seat of the version that is measured."""


def check_anchors(anchors: Sequence[str], bots: Sequence[str], plain: Match) -> None:
    """Raise `ConfigError` for an anchor that nobody knows, or that cannot sit down in this game."""
    known = [BASE, *(b for b in bots if b not in NO_ANCHORS)]
    for anchor in anchors:
        if anchors.count(anchor) > 1:
            raise ConfigError(f"eval.anchors names {anchor!r} twice: its games would count twice")
        if anchor not in known:
            raise ConfigError(f"eval.anchors: {anchor!r} is not a player that can be met{suggestion(anchor, known)}")
        if anchor != BASE:
            _try(anchor, plain)


def _try(anchor: str, plain: Match) -> None:
    seats = tuple(_sits(anchor, s) for s in plain.seats)
    environment = make_environment(plain.env, plain.env_params, plain.seed)
    try:
        sit_down(msgspec.structs.replace(plain, seats=seats), None, Sampling(), environment)
    except UserError as e:
        raise ConfigError(f"eval.anchors: {anchor} cannot play {plain.env}: {e}") from None


class AnchorGames:
    """Plays the games of one evaluation at a time."""

    def __init__(
        self, matchmaker: Matchmaker, anchors: Sequence[str], *, games: int, seed: int, pool: PoolSupervisor,
        waits: Waits, say: Callable[[str], None],
    ) -> None:  # fmt: skip
        self._plain, self._anchors, self._games, self._seed = matchmaker.match(0), tuple(anchors), games, seed
        self._pool, self._waits, self._say = pool, waits, say
        self._next_index = FIRST_INDEX
        self._open: dict[int, Pairing] = {}
        """Number of a match under way → anchor, seat."""
        self._again: list[Match] = []
        self._found: dict[Pairing, list[Episode]] = {}
        self._failed: Counter[Pairing] = Counter()

    async def play(self) -> dict[str, float]:
        """All games, with the versions that are current; figures by name. Raises `WorkerError` when all of a pairing failed."""
        matches = self._matches()
        self._open = {match.index: pairing for match, pairing in matches}
        self._found, self._failed = {pairing: [] for _, pairing in matches}, Counter()
        to_play = [match for match, _ in matches]
        while self._open:
            for match in to_play:
                await self._pool.submit(match)
            await self._waits.until("games against anchors to end", lambda: not self._open or bool(self._again))
            to_play, self._again = self._again, []
        return self._figures()

    def take(self, result: EpisodeResult | FailedResult) -> bool:
        """Whether the result is of an evaluation; then it is kept here, and nobody else must count it."""
        match = result.match
        if not FIRST_INDEX <= match.index < END_INDEX:
            return False
        if isinstance(result, EpisodeResult):
            self._found[self._open.pop(match.index)].append(result.episode)
        elif result.kind == "infrastructure" and match.attempt + 1 < MAX_ATTEMPTS:
            self._again.append(msgspec.structs.replace(match, attempt=match.attempt + 1))
        else:
            anchor, seat = pairing = self._open.pop(match.index)
            self._failed[pairing] += 1
            self._say(f"{seat} against {anchor} (seed {match.seed}): {result.kind} failure: {result.message}")
        return True

    def _matches(self) -> list[tuple[Match, Pairing]]:
        learners = [s.seat for s in self._plain.seats if s.trained]
        out = []
        for pairing in itertools.product(self._anchors, learners):
            for game in range(self._games):
                out.append((self._match(self._next_index, *pairing, game), pairing))
                self._next_index += 1
        return out

    def _match(self, index: int, anchor: str, seat: str, game: int) -> Match:
        seats = tuple(
            msgspec.structs.replace(s, trained=False) if s.seat == seat else _sits(anchor, s) for s in self._plain.seats
        )
        seed = derive_seed(self._seed, "evaluation", anchor, seat, game)
        return msgspec.structs.replace(self._plain, index=index, seed=seed, seats=seats)

    def _figures(self) -> dict[str, float]:
        out: dict[str, float] = {}
        for anchor in self._anchors:
            points, num = 0.0, 0
            for (other, seat), episodes in self._found.items():
                if other != anchor:
                    continue
                if not episodes:
                    raise WorkerError(
                        f"evaluation: every game of {seat} against {anchor} failed; the log has the reasons"
                    )
                shares = shares_of(seat, episodes)
                points += (shares["won"] + shares["drawn"] / 2) * len(episodes)
                num += len(episodes)
                out |= {f"{anchor}/{seat}/{name}": value for name, value in shares.items()}
                out[f"{anchor}/{seat}/failed"] = float(self._failed[anchor, seat])
            low, high = wilson(points, num)
            out |= {f"{anchor}/points": points / num, f"{anchor}/low": low, f"{anchor}/high": high}
        return out


def shares_of(seat: str, episodes: Sequence[Episode]) -> dict[str, float]:
    """Shares of games won, drawn and lost by ``seat``, and its mean reward."""
    num = len(episodes)
    won, drawn = sum(seat in e.winners for e in episodes) / num, sum(not e.winners for e in episodes) / num
    return {
        "won": won, "drawn": drawn, "lost": 1.0 - won - drawn, "reward": sum(e.rewards[seat] for e in episodes) / num,
    }  # fmt: skip


def _sits(anchor: str, seat: SeatAssignment) -> SeatAssignment:
    if anchor == BASE:
        return SeatAssignment(seat=seat.seat, player="llm", agent=BASE, options=dict(seat.options))
    return SeatAssignment(seat=seat.seat, player=anchor, agent=anchor)
