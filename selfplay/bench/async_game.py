"""A game of set length for measuring asynchrony: seats talk in turn, and one game in ``rare`` is ``longer`` times as long."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence

from selfplay.environment import Environment, Outcome


class LongTail(Environment):
    """``turns`` decisions, alternating between two seats; ``rare`` 0: all games are equally long. A coin decides who wins."""

    seats = ("first", "second")

    def __init__(self, rng: random.Random, turns: int = 6, rare: int = 0, longer: int = 6) -> None:
        super().__init__(rng)
        self._left = turns * (longer if rare and rng.randrange(rare) == 0 else 1)
        self._num_said = 0

    def rules(self, seat: str) -> str:
        return f"You are {seat}. Answer with any word."

    def to_move(self) -> Sequence[str]:
        return (self.seats[self._num_said % 2],) if self._num_said < self._left else ()

    def view(self, seat: str) -> str:
        return f"{seat}, turn {self._num_said}: a card {self.rng.randrange(52)}."

    def step(self, moves: Mapping[str, str]) -> None:  # noqa: ARG002
        self._num_said += 1

    def outcome(self) -> Outcome:
        winner, loser = self.rng.sample(self.seats, 2)
        return Outcome(rewards={winner: 1.0, loser: -1.0}, winners=(winner,), reason="a coin was thrown")
