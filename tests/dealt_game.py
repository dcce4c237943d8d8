"""A game of a bare file whose views name the deal, so that whoever reads a chat knows which game it belongs to."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence

from selfplay import Environment
from selfplay.environment import Outcome

TURNS = 4


class Doors(Environment):
    """Two players open doors in turn, two each; behind one of the two doors there is a point. More points win."""

    seats = ("first", "second")

    def __init__(self, rng: random.Random) -> None:
        super().__init__(rng)
        self.deal = rng.randrange(10**9)
        self.doors = [rng.choice(("left", "right")) for _ in range(TURNS)]
        self.points = {seat: 0 for seat in self.seats}
        self.turn = 0

    def to_move(self) -> Sequence[str]:
        return [self.seats[self.turn % 2]] if self.turn < TURNS else []

    def view(self, seat: str) -> str:
        return f"deal {self.deal} {seat} turn {self.turn}"

    def legal_moves(self, seat: str) -> Sequence[str]:
        return ("left", "right")

    def step(self, moves: Mapping[str, str]) -> None:
        ((seat, move),) = moves.items()
        self.points[seat] += move == self.doors[self.turn]
        self.turn += 1

    def outcome(self) -> Outcome:
        first, second = (self.points[seat] for seat in self.seats)
        return self.draw() if first == second else self.win(self.seats[first < second])
