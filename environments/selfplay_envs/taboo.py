"""Taboo: one seat leads the other to a word without saying it, or the words that come to mind first."""

from __future__ import annotations

import functools
import random
from collections.abc import Mapping, Sequence
from importlib import resources

import msgspec

from selfplay.environment import Environment, Forfeit, Outcome, named_move
from selfplay.errors import ConfigError, IllegalMove

PRIZES = (1.0, 0.6, 0.3)
"""What both get for a right guess at the first, second and third clue."""


class Card(msgspec.Struct, frozen=True):
    """A word, the words that may not be said, and words that may lead to it."""

    word: str
    taboo: tuple[str, ...]
    hints: tuple[str, ...]


class Taboo(Environment):
    """The giver sees a word and gives a clue of one word; the guesser names one of the words on the table.

    A clue must be a single word of letters and contain neither the word itself, nor a taboo word of its card, nor be
    contained in one. After a wrong guess the giver gives another clue, three in all; the wrong word leaves the table. Both
    get 1 for a right guess at the first clue, 0.6 at the second, 0.3 at the third, else 0: the game is cooperative. Words
    come from the shipped list; ``words`` of them (2 to 12) lie on the table. A seat that breaks a rule twice forfeits: 0
    for both.
    """

    seats: Sequence[str] = ("giver", "guesser")
    data_files = ("taboo_words.txt",)
    zero_sum = False
    reward_range = (0.0, 1.0)
    forfeit = Forfeit(retries=1, offender=0.0, others=0.0)
    max_turns = 2 * len(PRIZES)
    max_move_tokens = 12

    def __init__(self, rng: random.Random, words: int = 6) -> None:
        super().__init__(rng)
        if not 2 <= words <= 12:
            raise ConfigError(f"words is {words}; it must be between 2 and 12")
        table = rng.sample(cards(), words)
        self._card = rng.choice(table)
        self._table = [card.word for card in table]
        self._clues: list[str] = []
        self._guesses: list[str] = []

    def rules(self, seat: str) -> str:
        if seat == "giver":
            return "Lead the other player to a word with a clue of one word. Do not say the word or a taboo word."
        return "The other player gives you a clue of one word. Answer with the word from the list that it means."

    def to_move(self) -> Sequence[str]:
        if self._card.word in self._guesses or len(self._guesses) == len(PRIZES):
            return ()
        return ("guesser",) if len(self._clues) > len(self._guesses) else ("giver",)

    def view(self, seat: str) -> str:
        said = f"Clues so far: {', '.join(self._clues) or 'none'}. Wrong guesses: {', '.join(self._guesses) or 'none'}."
        if seat == "giver":
            return f"Word: {self._card.word}. Taboo: {', '.join(self._card.taboo)}. {said} Your clue:"
        return f"{said} Words: {', '.join(self.legal_moves(seat) or ())}. Which one?"

    def legal_moves(self, seat: str) -> Sequence[str] | None:
        return None if seat == "giver" else [w for w in self._table if w not in self._guesses]

    def suggestions(self, seat: str) -> Sequence[str]:
        """Clues for players that cannot read: of all cards, so that they give nothing away."""
        return [hint for card in cards() for hint in card.hints if not self._why_not(hint)]

    def parse(self, seat: str, text: str) -> str:
        if seat == "guesser":
            return named_move(text, self.legal_moves(seat) or ())
        clue = text.strip().strip(".,!?\"'").lower()
        if reason := self._why_not(clue):
            raise IllegalMove(reason)
        return clue

    def step(self, moves: Mapping[str, str]) -> None:
        ((seat, move),) = moves.items()
        (self._clues if seat == "giver" else self._guesses).append(move)

    def outcome(self) -> Outcome:
        found = self._card.word in self._guesses
        prize = PRIZES[len(self._guesses) - 1] if found else 0.0
        how = f"found at clue {len(self._guesses)}" if found else "not found"
        return Outcome(
            rewards=dict.fromkeys(self.seats, prize), winners=tuple(self.seats) if found else (),
            reason=f"{self._card.word} was {how}",
        )  # fmt: skip

    def private(self, seat: str) -> str:
        return f"{self._card} {self._table}" if seat == "giver" else str(self._table)

    def transcript(self) -> str:
        return f"clues: {', '.join(self._clues)}; guesses: {', '.join(self._guesses)}"

    def _why_not(self, clue: str) -> str:
        if not clue.isalpha() or len(clue) > 30:
            return "a clue is one word of letters"
        if clue in self._clues:
            return f"{clue!r} was said already"
        for word in (self._card.word, *self._card.taboo):
            if word in clue or clue in word:
                return f"{clue!r} is or contains the word or a taboo word"
        return ""


@functools.cache
def cards() -> tuple[Card, ...]:
    """The shipped cards, in file order."""
    text = resources.files("selfplay_envs").joinpath("taboo_words.txt").read_text("utf-8")
    out = []
    for line in text.splitlines():
        word, _, rest = line.partition(": ")
        taboo, _, hints = rest.partition(" | ")
        if not line.startswith("#"):
            out.append(Card(word, tuple(taboo.split()), tuple(hints.split())))
    return tuple(out)
