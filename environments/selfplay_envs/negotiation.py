"""Deal or no deal: two seats divide a few items that each values differently (Lewis et al., 2017)."""

from __future__ import annotations

import itertools
import random
from collections.abc import Mapping, Sequence

from selfplay.environment import Environment, Forfeit, Outcome
from selfplay.errors import ConfigError

ITEMS = ("book", "hat", "ball")
TOTAL_VALUE = 10
ACCEPT = "accept"


class Negotiation(Environment):
    """Books, hats and balls, five to seven in all and at least one of each, are to be divided between two seats.

    Each seat has its own value for each kind, known to it alone; all items together are worth 10 to either. Every kind is
    worth something to somebody, and at least one kind to both. In turn a seat offers a division, by saying how many books,
    hats and balls it keeps (three digits, ``210``: two books and one hat), or says ``accept`` to the other's last offer.
    Without a deal after ``offers`` moves both get nothing.

    The reward of a seat is the value of what it gets, divided by 10: 0 to 1; the game is not zero-sum, and to agree on a bad
    division is better than not to agree. The seat with more wins; equal values or no deal are a draw. A seat that says
    nothing legal twice forfeits: 0 for both.
    """

    seats: Sequence[str] = ("player_0", "player_1")
    zero_sum = False
    reward_range = (0.0, 1.0)
    forfeit = Forfeit(retries=1, offender=0.0, others=0.0)
    max_move_tokens = 8

    def __init__(self, rng: random.Random, offers: int = 8) -> None:
        super().__init__(rng)
        if not 2 <= offers <= 50:
            raise ConfigError(f"offers is {offers}; it must be between 2 and 50")
        self.max_turns = offers
        self._counts, self._values = _drawn(rng)
        self._said: list[str] = []

    def rules(self, seat: str) -> str:
        return (
            "You divide items with another player. Say how many books, hats and balls you keep, as three digits, or accept "
            f"the other's offer. No deal after {self.max_turns} moves: nothing for both. Answer with one word."
        )

    def to_move(self) -> Sequence[str]:
        over = len(self._said) == self.max_turns or ACCEPT in self._said
        return () if over else (self.seats[len(self._said) % 2],)

    def view(self, seat: str) -> str:
        me = self.seats.index(seat)
        items = ", ".join(f"{n} {name}{'s' * (n > 1)}" for n, name in zip(self._counts, ITEMS, strict=True))
        values = ", ".join(f"{name} {v}" for v, name in zip(self._values[me], ITEMS, strict=True))
        offers = "; ".join(
            f"{'you' if i % 2 == me else 'other'} keep{'s' * (i % 2 != me)} {said}" for i, said in enumerate(self._said)
        )
        return f"Items: {items}. Worth to you each: {values}. Offers so far: {offers or 'none'}."

    def legal_moves(self, seat: str) -> Sequence[str]:
        splits = ["".join(map(str, keep)) for keep in itertools.product(*(range(n + 1) for n in self._counts))]
        return [ACCEPT, *splits] if self._said else splits

    def step(self, moves: Mapping[str, str]) -> None:
        self._said += moves.values()

    def outcome(self) -> Outcome:
        if self._said[-1] != ACCEPT:
            return self.draw(f"no deal in {self.max_turns} moves")
        maker = len(self._said) % 2  # the offer before the last word
        kept = [int(d) for d in self._said[-2]]
        shares = {maker: kept, 1 - maker: [n - k for n, k in zip(self._counts, kept, strict=True)]}
        worth = [sum(n * v for n, v in zip(shares[i], self._values[i], strict=True)) for i in (0, 1)]
        winners = () if worth[0] == worth[1] else (self.seats[worth[1] > worth[0]],)
        return Outcome(
            rewards={s: w / TOTAL_VALUE for s, w in zip(self.seats, worth, strict=True)}, winners=winners,
            reason=f"a deal: {worth[0]} and {worth[1]} of {TOTAL_VALUE}", info={"deal": True},
        )  # fmt: skip

    def private(self, seat: str) -> str:
        return str(self._values[self.seats.index(seat)])

    def transcript(self) -> str:
        return f"{self._counts} {' '.join(self._said)}"


def _drawn(rng: random.Random) -> tuple[tuple[int, ...], tuple[tuple[int, ...], tuple[int, ...]]]:
    """(how many of each item, both seats' values)."""
    while True:
        counts = tuple(rng.randint(1, 5) for _ in ITEMS)
        if not 5 <= sum(counts) <= 7:
            continue
        fair = [v for v in itertools.product(range(TOTAL_VALUE + 1), repeat=3) if _worth(counts, v) == TOTAL_VALUE]
        first, second = rng.choice(fair), rng.choice(fair)
        pairs = list(zip(first, second, strict=True))
        if all(a or b for a, b in pairs) and any(a and b for a, b in pairs):
            return counts, (first, second)


def _worth(counts: Sequence[int], values: Sequence[int]) -> int:
    return sum(n * v for n, v in zip(counts, values, strict=True))
