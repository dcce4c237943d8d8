"""Nim in one file: `selfplay play examples/nim.py --players random,human -p heap=21`."""

from selfplay import Environment


class Nim(Environment):
    """Take 1, 2 or 3 sticks in turn. Whoever takes the last stick wins. Answer with one number."""

    seats = ("first", "second")

    def __init__(self, rng, heap: int = 21):
        super().__init__(rng)
        self.left, self.turn = heap, 0

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
        return self.win(self.seats[(self.turn - 1) % 2])

    def transcript(self):
        return f"sticks left: {self.left}"

    def private(self, seat):
        return ""  # nothing is hidden
