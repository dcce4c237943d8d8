"""What ratings are made from: who sat where, who finished before whom, and which games belong together."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import msgspec


class RatedGame(msgspec.Struct, frozen=True, kw_only=True):
    """One finished game."""

    players: tuple[str, ...]
    """Player at each seat, in seat order."""
    places: tuple[int, ...]
    """Per seat, the lower the better; equal places are a tie. Seats of a team share theirs."""
    cluster: str
    """Games of one cluster are not independent: the same deal with the seats swapped."""
    teams: tuple[int, ...] = ()
    """Per seat, its team; empty when every seat plays for itself."""

    @property
    def is_mirror(self) -> bool:
        """Whether one player sits everywhere: such a game says nothing about who is better."""
        return len(set(self.players)) == 1


def places_of(seats: Sequence[str], winners: Iterable[str], rewards: Mapping[str, float]) -> tuple[int, ...]:
    """Places by the game's own verdict: winners before all others; among more than two seats the losers by their rewards.

    When nobody or everybody wins all share the first place.
    """
    won = set(winners)
    if not won or len(won) == len(seats):
        return (0,) * len(seats)
    if len(seats) == 2:
        return tuple(0 if s in won else 1 for s in seats)
    levels = sorted({(s not in won, -rewards[s] if s not in won else 0.0) for s in seats})
    return tuple(levels.index((s not in won, -rewards[s] if s not in won else 0.0)) for s in seats)
