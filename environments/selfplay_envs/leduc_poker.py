"""Leduc hold'em: poker with one private card, one public card and two betting rounds (Southey et al., 2005)."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence

from selfplay.environment import Environment, Forfeit, Outcome
from selfplay.errors import ConfigError

RANKS = ("J", "Q", "K")
RAISE_BY = (2, 4)
MAX_RAISES = 2
FOLD, CHECK, CALL, RAISE = "fold", "check", "call", "raise"
LETTERS = {FOLD: "f", CHECK: "k", CALL: "c", RAISE: "r"}


class LeducPoker(Environment):
    """Six cards, two each of J, Q and K; one private card each; a public card after the first betting round.

    Both seats pay an ante of 1. In each round ``player_0`` begins. With nothing to pay a seat may ``check`` or ``raise``;
    facing a raise it may ``fold``, ``call`` or ``raise``. A raise adds 2 chips in the first round and 4 in the second; at
    most two raises per round. A round ends when both have checked or a raise was called. At the end a pair with the public
    card wins, else the higher card; equal cards split the pot. Rewards are the chips won or lost, at most 13.

    ``wording="short"`` shows the state in a few letters, for models that read bytes: own card, public card or ``-``, and each
    round's moves (f, k for check, c, r), as in ``Q- kr`` and ``QK kc r``.

    An answer without a legal move may be tried again once, then the seat forfeits 13 chips to the other.
    Uniformly random play has NashConv 4.747222 and value -0.078125 for ``player_0``.
    """

    seats: Sequence[str] = ("player_0", "player_1")
    reward_range = (-13.0, 13.0)
    forfeit = Forfeit(retries=1, offender=-13.0, others=13.0)
    max_turns = 8
    max_move_tokens = 8

    def __init__(self, rng: random.Random, wording: str = "plain") -> None:
        super().__init__(rng)
        if wording not in ("plain", "short"):
            raise ConfigError(f"wording is {wording!r}; it must be plain or short")
        self._short = wording == "short"
        self._cards = rng.sample(RANKS * 2, 3)  # player_0, player_1, public
        self._rounds: list[list[str]] = [[]]
        self._paid = [1, 1]
        self._folded: int | None = None

    def rules(self, seat: str) -> str:
        return (
            "You play Leduc poker: two cards each of J, Q, K. You hold one card; a public card comes after the first round. "
            "A pair with it wins, else the higher card. Answer with one word."
        )

    def to_move(self) -> Sequence[str]:
        if self._folded is not None or (len(self._rounds) == 2 and _closed(self._rounds[1])):
            return ()
        return (self.seats[len(self._rounds[-1]) % 2],)

    def view(self, seat: str) -> str:
        me = self.seats.index(seat)
        if self._short:
            rounds = " ".join("".join(LETTERS[m] for m in moves) for moves in self._rounds)
            return f"{self._cards[me]}{self._cards[2] if len(self._rounds) == 2 else '-'} {rounds}".rstrip()
        choice = f" Choose: {', '.join(self.legal_moves(seat))}." if seat in self.to_move() else ""
        return (
            f"Your card: {self._cards[me]}. {self.transcript()} You paid {self._paid[me]}, "
            f"the other {self._paid[1 - me]}.{choice}"
        )

    def legal_moves(self, seat: str) -> Sequence[str]:
        moves = (FOLD, CALL) if self._paid[0] != self._paid[1] else (CHECK,)
        return (*moves, RAISE) if self._rounds[-1].count(RAISE) < MAX_RAISES else moves

    def step(self, moves: Mapping[str, str]) -> None:
        ((seat, move),) = moves.items()
        me, history = self.seats.index(seat), self._rounds[-1]
        history.append(move)
        if move == FOLD:
            self._folded = me
        elif move in (CALL, RAISE):
            self._paid[me] = self._paid[1 - me] + (RAISE_BY[len(self._rounds) - 1] if move == RAISE else 0)
        if len(self._rounds) == 1 and _closed(history):
            self._rounds.append([])

    def outcome(self) -> Outcome:
        first, second = self.seats
        gain, reason = self._gain()
        winners = () if not gain else (first,) if gain > 0 else (second,)
        return Outcome(rewards={first: float(gain), second: float(-gain)}, winners=winners, reason=reason)

    def private(self, seat: str) -> str:
        return self._cards[self.seats.index(seat)]

    def transcript(self) -> str:
        """The public record: the public card once it lies there, and each round's moves."""
        public = self._cards[2] if len(self._rounds) == 2 else "none"
        rounds = [f"Round {i}: {', '.join(moves) or 'none'}." for i, moves in enumerate(self._rounds, 1)]
        return " ".join([f"Public card: {public}.", *rounds])

    def _gain(self) -> tuple[int, str]:
        """Chips that ``player_0`` wins, and how it ended."""
        if self._folded is not None:
            loser = self.seats[self._folded]
            return self._paid[self._folded] * (1 if self._folded else -1), f"{loser} folded"
        mine, theirs = (self._strength(i) for i in (0, 1))
        if mine == theirs:
            return 0, "showdown: the pot is split"
        winner = self.seats[theirs > mine]
        return self._paid[0] * (1 if mine > theirs else -1), f"showdown: {winner} wins"

    def _strength(self, seat: int) -> int:
        card, public = self._cards[seat], self._cards[2]
        return len(RANKS) if card == public else RANKS.index(card)


def _closed(moves: Sequence[str]) -> bool:
    """Whether a betting round is over: a call, or two checks."""
    return bool(moves) and (moves[-1] == CALL or list(moves) == [CHECK, CHECK])
