"""Nim, in one file."""

from selfplay import Environment


class Nim(Environment):
    """Take 1, 2 or 3 stones in turn. Whoever takes the last stone wins. Answer with one number."""

    seats = ("first", "second")
    stones, turn = 11, 0

    def to_move(self):
        return [self.seats[self.turn % 2]] if self.stones else []

    def view(self, seat):
        return f"{self.stones} stones are left."

    def legal_moves(self, seat):
        return [str(n) for n in (1, 2, 3) if n <= self.stones]

    def step(self, moves):
        self.stones, self.turn = self.stones - int(*moves.values()), self.turn + 1

    def outcome(self):
        return self.win(self.seats[(self.turn - 1) % 2])
