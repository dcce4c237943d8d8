"""Liar's dice: hidden dice, rising bids, and somebody who does not believe them."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence

from selfplay.environment import Environment, Forfeit, Outcome
from selfplay.errors import ConfigError
from selfplay.types import Scalar

FACES = 6
LIAR = "liar"


class LiarsDice(Environment):
    """Every seat rolls its dice in secret. In turn a seat bids how many dice of a face lie on the whole table, or says
    ``liar`` to the bid before it.

    A bid is a number and a face, ``2x5``: at least two fives. It must be higher than the last: more dice, or as many of a
    higher face. With ``wild``, ones count as every face. After ``liar`` all dice are shown: if the bid was true, the seat
    that doubted loses a die, else the seat that bid. All roll again; the loser of the round begins, or the next seat if it
    is out. A seat without dice is out and is asked no more; the last seat with dice wins.

    2 to 6 ``players`` with ``dice`` (1 to 5) each. Rewards: 1 for the winner, -1 shared by the others. An answer that is
    neither a higher bid nor ``liar`` may be tried again once, then the seat forfeits.
    """

    max_move_tokens = 8
    presets: Mapping[str, Mapping[str, Scalar]] = {"classic": {"players": 4, "dice": 5, "wild": True}}

    def __init__(self, rng: random.Random, players: int = 2, dice: int = 2, wild: bool = False) -> None:
        super().__init__(rng)
        if not 2 <= players <= 6:
            raise ConfigError(f"players is {players}; the game is for 2 to 6")
        if not 1 <= dice <= 5:
            raise ConfigError(f"dice is {dice}; it must be between 1 and 5")
        self.seats = tuple(f"player_{i}" for i in range(players))
        self.forfeit = Forfeit(retries=1, offender=-1.0, others=1.0 / (players - 1))
        self._wild, self._left, self._mover = wild, [dice] * players, 0
        self._rounds: list[str] = []
        # At most every possible bid and a doubt, in as many rounds as dice can be lost.
        self.max_turns = sum(range(dice, players * dice + 1)) * FACES + players * dice
        self._roll()

    def rules(self, seat: str) -> str:
        wild = " Ones count as every face." if self._wild else ""
        return (
            f"You play liar's dice as {seat}. Bid how many dice of a face all players have together, like 2x5, always higher, "
            f"or say liar.{wild} Who is wrong loses a die. Answer with one word."
        )

    def to_move(self) -> Sequence[str]:
        return (self.seats[self._mover],) if sum(n > 0 for n in self._left) > 1 else ()

    def view(self, seat: str) -> str:
        mine = " ".join(map(str, self._dice[self.seats.index(seat)])) or "none"
        return f"Your dice: {mine}. {self.transcript()}"

    def legal_moves(self, seat: str) -> Sequence[str]:
        total = sum(self._left)
        last = _bid(self._bids[-1][1]) if self._bids else (0, 0)
        bids = [f"{n}x{face}" for n in range(1, total + 1) for face in range(1, FACES + 1) if (n, face) > last]
        return [*bids, LIAR] if self._bids else bids

    def step(self, moves: Mapping[str, str]) -> None:
        ((seat, move),) = moves.items()
        if move != LIAR:
            self._bids.append((self._mover, move))
            self._mover = self._next(self._mover)
            return
        bidder, bid = self._bids[-1]
        number, face = _bid(bid)
        found = sum(d == face or (self._wild and d == 1) for dice in self._dice for d in dice)
        loser = self._mover if found >= number else bidder
        self._left[loser] -= 1
        self._rounds.append(f"{self.seats[bidder]} bid {bid}, {seat} said liar, there were {found}")
        self._mover = loser if self._left[loser] else self._next(loser)
        self._roll()

    def outcome(self) -> Outcome:
        (winner,) = [s for s, n in zip(self.seats, self._left, strict=True) if n]
        return self.win(winner, reason=f"{winner} is the last with dice")

    def private(self, seat: str) -> str:
        return str(self._dice[self.seats.index(seat)])

    def transcript(self) -> str:
        left = ", ".join(f"{s} {n}" for s, n in zip(self.seats, self._left, strict=True))
        bids = ", ".join(f"{self.seats[i]} {bid}" for i, bid in self._bids) or "none"
        last = f" Last round: {self._rounds[-1]}." if self._rounds else ""
        return f"Dice left: {left}.{last} Bids: {bids}."

    def _roll(self) -> None:
        self._bids: list[tuple[int, str]] = []
        self._dice = [sorted(self.rng.randint(1, FACES) for _ in range(n)) for n in self._left]

    def _next(self, seat: int) -> int:
        order = [(seat + k) % len(self.seats) for k in range(1, len(self.seats) + 1)]
        return next(i for i in order if self._left[i])


def _bid(text: str) -> tuple[int, int]:
    number, _, face = text.partition("x")
    return int(number), int(face)
