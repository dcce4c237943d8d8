"""TextArena used as one would at first: one wrapped instance for all games, reset with a seed. Not sound; tests say why."""

from __future__ import annotations

import random
import warnings
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from selfplay import Environment, Outcome

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import textarena


class Naive(Environment):
    """TextArena's tic-tac-toe without an adapter."""

    seats = ("player_0", "player_1")
    zero_sum = False
    max_turns = 40
    shared: ClassVar[Any] = None

    def __init__(self, rng: random.Random) -> None:
        super().__init__(rng)
        if Naive.shared is None:
            Naive.shared = textarena.make("TicTacToe-v0")
        self.shared.reset(num_players=2, seed=rng.randrange(2**31))
        self.done = False
        self.player, self.text = self.shared.get_observation()

    def to_move(self) -> Sequence[str]:
        return () if self.done else (self.seats[self.player],)

    def view(self, seat: str) -> str:
        return str(self.text)

    def suggestions(self, seat: str) -> Sequence[str]:
        return [f"[{n}]" for n in range(9)]

    def step(self, moves: Mapping[str, str]) -> None:
        self.done, _ = self.shared.step(next(iter(moves.values())))
        if not self.done:
            self.player, self.text = self.shared.get_observation()

    def outcome(self) -> Outcome:
        rewards, _ = self.shared.close()
        return Outcome(rewards={s: float(rewards[i]) for i, s in enumerate(self.seats)})
