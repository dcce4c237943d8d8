"""Kuhn poker: the standard small game of hidden information, with a known equilibrium value of -1/18 for two players."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence

from selfplay.environment import Environment, Forfeit, Outcome
from selfplay.errors import ConfigError

RANKS = ("9", "T", "J", "Q", "K")
PASS, BET = "pass", "bet"


class KuhnPoker(Environment):
    """One card each from a deck of one card more than players; one chip ante; one betting round of one chip.

    Seats act in order and say ``pass`` or ``bet``. Until somebody bets, ``pass`` checks; after a bet every other seat,
    in order, answers once: ``bet`` calls it, ``pass`` folds. If nobody bets, the highest card takes the antes; otherwise
    the highest card among those who bet takes the pot. Rewards are the chips won or lost: with two players 1 or 2.

    The parameter ``players`` (2 to 4) sets the number of seats; two players and the cards J, Q, K are the game of the
    literature (Kuhn, 1950). ``wording="short"`` shows card and moves as letters, for models that read bytes: ``K``, ``K pb``. An answer without a legal move may be tried again once, then the seat forfeits: it loses 2
    chips, shared equally by the others.
    """

    max_move_tokens = 8

    def __init__(self, rng: random.Random, players: int = 2, wording: str = "plain") -> None:
        super().__init__(rng)
        if not 2 <= players <= 4:
            raise ConfigError(f"players is {players}; the game is for 2 to 4")
        if wording not in ("plain", "short"):
            raise ConfigError(f"wording is {wording!r}; it must be plain or short")
        self._short = wording == "short"
        self.seats = tuple(f"player_{i}" for i in range(players))
        self.reward_range = (-2.0, 2.0 * (players - 1))
        self.forfeit = Forfeit(retries=1, offender=-2.0, others=2.0 / (players - 1))
        self.max_turns = 2 * players - 1
        self._deck = RANKS[-(players + 1) :]
        self._cards = rng.sample(self._deck, players)
        self._history: list[str] = []

    def rules(self, seat: str) -> str:
        n = len(self.seats)
        game = "Kuhn poker" if n == 2 else f"Kuhn poker, {n} players, cards {' '.join(self._deck)}"
        return f"You play {game}. Answer with one word, pass or bet."

    def to_move(self) -> Sequence[str]:
        done, n = len(self._history), len(self.seats)
        first_bet = self._history.index(BET) if BET in self._history else None
        over = done == n if first_bet is None else done == first_bet + n
        return () if over else (self.seats[done % n],)

    def view(self, seat: str) -> str:
        card = self._cards[self.seats.index(seat)]
        if self._short:
            return f"{card} {''.join(move[0] for move in self._history)}".rstrip()
        # Of 18 wordings this one started a 135M chat model nearest to both: legal answers (0.6; others 0.1 to 0.5), and an
        # even choice between them (bet 0.4 to 0.55). A model that never says one of the moves cannot learn when to.
        history = ", ".join(self._history) or "none"
        return f"Card: {card}. History: {history}. Pass or bet? Bet or pass?"

    def legal_moves(self, seat: str) -> Sequence[str]:
        return (PASS, BET)

    def step(self, moves: Mapping[str, str]) -> None:
        self._history += moves.values()

    def outcome(self) -> Outcome:
        n = len(self.seats)
        stakes = [1 + (BET in self._history[i::n]) for i in range(n)]
        contenders = [i for i in range(n) if stakes[i] == max(stakes)]
        winner = max(contenders, key=lambda i: self._deck.index(self._cards[i]))
        rewards = {s: float(-stakes[i]) for i, s in enumerate(self.seats)}
        rewards[self.seats[winner]] += sum(stakes)
        how = "showdown" if len(contenders) > 1 else "the others folded"
        return Outcome(rewards=rewards, winners=(self.seats[winner],), reason=f"{self.seats[winner]} wins: {how}")

    def private(self, seat: str) -> str:
        return self._cards[self.seats.index(seat)]

    def transcript(self) -> str:
        return f"History: {', '.join(self._history) or 'none'}"
