"""A game of eight seats and one move each, all at once: small enough to play hundreds, large enough for a rule per agent."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence

from selfplay.environment import Environment, Forfeit, Outcome


class Crowd(Environment):
    """Everybody says a or b at once; those who said a win."""

    seats = tuple(f"s{n}" for n in range(8))
    max_move_tokens = 2
    zero_sum = False
    reward_range = (0.0, 1.0)
    forfeit = Forfeit(retries=0, offender=0.0, others=0.0)

    def __init__(self, rng: random.Random) -> None:
        super().__init__(rng)
        self.said: dict[str, str] = {}

    def to_move(self) -> Sequence[str]:
        return () if self.said else self.seats

    def view(self, seat: str) -> str:
        return f"You are {seat}."

    def legal_moves(self, seat: str) -> Sequence[str] | None:
        return None

    def step(self, moves: Mapping[str, str]) -> None:
        self.said = dict(moves)

    def outcome(self) -> Outcome:
        winners = tuple(s for s, word in self.said.items() if len(word) % 2)
        return Outcome(
            rewards={s: float(s in winners) for s in self.seats}, winners=winners, reason="an odd number of letters"
        )
