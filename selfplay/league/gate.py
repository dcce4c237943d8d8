"""The promotion gate: a candidate takes the incumbent's place only when a sequential test on their games says that it is better.

In: the games between the two. Out: a `Verdict`. Nothing is remembered here: the games are in ``league.sqlite``, so a resumed run
stands where it stood.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

import msgspec

from selfplay.league.records import GameRecord
from selfplay.ratings.match import Hypotheses, SprtState, sprt, trinomial


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """``promoted``: the candidate is the incumbent from now on. ``rejected``: it is not, for good. ``open``: more games."""

    candidate: str
    incumbent: str
    wins: int
    draws: int
    losses: int
    test: SprtState

    @property
    def outcome(self) -> Literal["promoted", "rejected", "open"]:
        return {"H1": "promoted", "H0": "rejected", None: "open"}[self.test.decision]  # type: ignore[return-value]


def judge(candidate: str, incumbent: str, games: Iterable[GameRecord], hypotheses: Hypotheses) -> Verdict:
    """What the two-player games between them say; forfeits count, truncated games do not."""
    results = {"win": 0, "draw": 0, "loss": 0}
    for game in games:
        seats = {player: seat for seat, player in game.players.items()}
        if set(seats) == {candidate, incumbent} and len(game.players) == 2 and game.ended != "truncated":
            results[game.result(seats[candidate])] += 1
    scores = trinomial(results["win"], results["draw"], results["loss"])
    return Verdict(
        candidate=candidate, incumbent=incumbent, wins=results["win"], draws=results["draw"], losses=results["loss"],
        test=sprt(scores, hypotheses),
    )  # fmt: skip
