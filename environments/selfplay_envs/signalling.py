"""The signalling game: two seats must find a language of their own (Lewis, 1969)."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence

from selfplay.environment import Environment, Forfeit, Outcome
from selfplay.errors import ConfigError

OBJECTS = ("apple", "boat", "chair", "drum", "egg", "fish", "gate", "hat")
SIGNALS = ("ka", "lo", "mi", "nu", "pe", "ra", "so", "tu")


class Signalling(Environment):
    """A sender sees one of a few objects and says one of a few meaningless words; a receiver hears the word and names an
    object. Both are told what the object was, and the next round begins.

    ``objects`` (2 to 8) things and ``signals`` words, ``rounds`` rounds; the object is drawn evenly from the seed. The order
    of words and things in what is shown is drawn anew in every round, so that a place in a list means nothing. The reward
    of both is the share of rounds in which the receiver was right, 0 to 1: the game is cooperative, both win or nobody.
    With fewer words than things no language is perfect: the best is signals / objects on average. A seat that says nothing
    legal twice forfeits: 0 for both.
    """

    seats: Sequence[str] = ("sender", "receiver")
    zero_sum = False
    reward_range = (0.0, 1.0)
    forfeit = Forfeit(retries=1, offender=0.0, others=0.0)
    max_move_tokens = 8

    def __init__(self, rng: random.Random, objects: int = 4, signals: int = 4, rounds: int = 8) -> None:
        super().__init__(rng)
        for name, value, high in (
            ("objects", objects, len(OBJECTS)),
            ("signals", signals, len(SIGNALS)),
            ("rounds", rounds, 100),
        ):
            if not (1 if name == "rounds" else 2) <= value <= high:
                raise ConfigError(f"{name} is {value}; it must be between {1 if name == 'rounds' else 2} and {high}")
        self.max_turns = 2 * rounds
        self._rounds = rounds
        self._past: list[tuple[str, str, str]] = []
        self._things, self._words = list(OBJECTS[:objects]), list(SIGNALS[:signals])
        self._begin_round()

    def rules(self, seat: str) -> str:
        if seat == "sender":
            return "You see an object and send one word. The other must guess the object. Answer with one word from the list."
        return "You hear a word and guess which object the other saw. Answer with one object from the list."

    def to_move(self) -> Sequence[str]:
        if len(self._past) == self._rounds:
            return ()
        return ("receiver",) if self._signal else ("sender",)

    def view(self, seat: str) -> str:
        past = "; ".join(f"{word} for {thing}, guessed {guess}" for thing, word, guess in self._past) or "none"
        now = f"Object: {self._object}." if seat == "sender" else f"Word: {self._signal or 'none yet'}."
        return f"Past rounds: {past}. {now} Choose: {', '.join(self.legal_moves(seat))}."

    def legal_moves(self, seat: str) -> Sequence[str]:
        return list(self._shown_words if seat == "sender" else self._shown_things)

    def step(self, moves: Mapping[str, str]) -> None:
        ((seat, move),) = moves.items()
        if seat == "sender":
            self._signal = move
            return
        self._past.append((self._object, self._signal, move))
        self._begin_round()

    def outcome(self) -> Outcome:
        right = sum(thing == guess for thing, _, guess in self._past)
        share = right / self._rounds
        return Outcome(
            rewards=dict.fromkeys(self.seats, share), winners=tuple(self.seats) if right == self._rounds else (),
            reason=f"{right} of {self._rounds} right",
        )  # fmt: skip

    def private(self, seat: str) -> str:
        shown = self._shown_words if seat == "sender" else self._shown_things
        return f"{self._object if seat == 'sender' else self._signal} {shown}"

    def transcript(self) -> str:
        return "\n".join(f"{thing}: {word}, guessed {guess}" for thing, word, guess in self._past)

    def _begin_round(self) -> None:
        self._signal = ""
        self._object = self.rng.choice(self._things)
        self._shown_words = self.rng.sample(self._words, len(self._words))
        self._shown_things = self.rng.sample(self._things, len(self._things))
