"""Nim: heaps of stones, perfect information, solved by the nim-sum (Bouton, 1901)."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence

from selfplay.environment import Environment, Outcome
from selfplay.errors import ConfigError
from selfplay.types import Scalar

MAX_HEAPS, MAX_STONES = 8, 40
LETTERS = "abcdefgh"


class Nim(Environment):
    """Two seats take stones in turn, each time from one heap; who takes the last stone wins.

    ``heaps`` are the sizes, as ``11`` or ``3,4,5``; ``most`` is how many stones one move may take (0: any number); with
    ``misere`` who takes the last stone loses. With one heap a move is a number of stones (``2``), with several a heap and
    a number (``b2``). Rewards: 1 for the winner, -1 for the loser. An illegal move may be tried again once, then the game
    is forfeited.

    With heaps taken modulo ``most`` + 1, the seat to move loses the normal game exactly when their nim-sum is 0.
    """

    seats: Sequence[str] = ("first", "second")
    max_move_tokens = 8
    presets: Mapping[str, Mapping[str, Scalar]] = {
        "classic": {"heaps": "3,4,5", "most": 0},
        "marienbad": {"heaps": "1,3,5,7", "most": 0, "misere": True},
    }

    def __init__(self, rng: random.Random, heaps: str = "11", most: int = 3, misere: bool = False) -> None:
        super().__init__(rng)
        if not 0 <= most <= MAX_STONES:
            raise ConfigError(f"most is {most}; it must be between 1 and {MAX_STONES}, or 0 for any number")
        self._heaps, self._most, self._misere = _sizes(heaps), most or MAX_STONES, misere
        self._history: list[str] = []
        self.max_turns = sum(self._heaps)

    def rules(self, seat: str) -> str:
        most = "any number of stones" if self._most == MAX_STONES else f"1 to {self._most} stones"
        from_heap = "" if len(self._heaps) == 1 else " from one heap"
        last = "loses" if self._misere else "wins"
        return f"You play Nim. Take {most}{from_heap}. Who takes the last stone {last}. Answer with one move."

    def to_move(self) -> Sequence[str]:
        return (self.seats[len(self._history) % 2],) if any(self._heaps) else ()

    def view(self, seat: str) -> str:
        choice = f" Choose: {', '.join(self.legal_moves(seat))}." if seat in self.to_move() else ""
        return f"{self.transcript()}{choice}"

    def legal_moves(self, seat: str) -> Sequence[str]:
        names = [""] if len(self._heaps) == 1 else LETTERS
        return [
            f"{name}{n}"
            for name, heap in zip(names, self._heaps, strict=False)
            for n in range(1, min(heap, self._most) + 1)
        ]

    def step(self, moves: Mapping[str, str]) -> None:
        (move,) = moves.values()
        heap, taken = (LETTERS.index(move[0]), move[1:]) if move[0] in LETTERS else (0, move)
        self._heaps[heap] -= int(taken)
        self._history.append(move)

    def outcome(self) -> Outcome:
        last = (len(self._history) - 1) % 2
        winner, loser = self.seats[last ^ self._misere], self.seats[1 - (last ^ self._misere)]
        return Outcome(
            rewards={winner: 1.0, loser: -1.0}, winners=(winner,), reason=f"{self.seats[last]} took the last stone"
        )

    def private(self, seat: str) -> str:
        return ""  # nothing is hidden

    def transcript(self) -> str:
        if len(self._heaps) == 1:
            return f"Stones left: {self._heaps[0]}."
        return f"Heaps: {', '.join(f'{name} has {n}' for name, n in zip(LETTERS, self._heaps, strict=False))}."


def _sizes(text: str) -> list[int]:
    parts = [p.strip() for p in text.split(",")]
    if not all(p.isascii() and p.isdigit() and len(p) < 4 for p in parts):
        raise ConfigError(f"heaps is {text!r}; write sizes as 11 or 3,4,5")
    sizes = [int(p) for p in parts]
    if len(sizes) > MAX_HEAPS or not all(1 <= n <= MAX_STONES for n in sizes):
        raise ConfigError(f"heaps is {text!r}; 1 to {MAX_HEAPS} heaps of 1 to {MAX_STONES} stones can be played")
    return sizes
