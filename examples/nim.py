"""Nim in one file: `selfplay play examples/nim.py --players random,human`."""

import random

from selfplay import Environment, Outcome


class Nim(Environment):
    """Take 1 to 3 sticks in turn; whoever takes the last one wins."""

    seats = ("first", "second")

    def __init__(self, rng: random.Random, heap: int = 21) -> None:
        super().__init__(rng)
        self.left, self.turn = heap, 0

    def rules(self, seat):
        return "Take 1, 2 or 3 sticks in turn. Whoever takes the last stick wins. Answer with a number."

    def to_move(self):
        return [self.seats[self.turn % 2]] if self.left else []

    def view(self, seat):
        return f"{self.left} sticks are left."

    def legal_moves(self, seat):
        return [str(n) for n in (1, 2, 3) if n <= self.left]

    def step(self, moves):
        self.left -= int(*moves.values())
        self.turn += 1

    def outcome(self):
        winner = self.seats[(self.turn - 1) % 2]
        return Outcome(rewards={s: 1.0 if s == winner else -1.0 for s in self.seats}, winners=(winner,))
