"""The same question asked in another way: moves listed in another order, or going by each other's names.

In: a chat and the moves of a game. Out: chats that a player who understood the game would answer just as well. How far the
evaluation differs between them is how much of it hangs on words.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping, Sequence
from typing import Literal

import msgspec

from selfplay.agent import Message

MAX_MOVES = 3
"""All orders of so many moves are tried; with more, words and moves are too many to trade places sensibly."""


class Relabelling(msgspec.Struct, frozen=True, kw_only=True):
    """Moves that trade names. ``order``: only where all moves are offered for choice (``a, b or c``); ``label``: everywhere,
    and the answers are read by the new names."""

    kind: Literal["order", "label"]
    names: dict[str, str]

    def chat(self, messages: Sequence[Message]) -> tuple[Message, ...]:
        """The chat, asked anew."""
        change = self._everywhere if self.kind == "label" else self._offers
        return tuple(Message(m.role, change(m.content)) for m in messages)

    def answer(self, text: str) -> str:
        """How a move that was said as ``text`` is said now."""
        return self._everywhere(text) if self.kind == "label" else text

    def _everywhere(self, text: str) -> str:
        return _words(self.names).sub(lambda m: _like(m.group(), self.names[m.group().casefold()]), text)

    def _offers(self, text: str) -> str:
        return _offer(self.names).sub(lambda m: self._offer(m.group()), text)

    def _offer(self, text: str) -> str:
        named = [m.group().casefold() for m in _words(self.names).finditer(text)]
        return self._everywhere(text) if sorted(named) == sorted(self.names) else text


def relabellings(moves: Sequence[str]) -> list[Relabelling]:
    """Every other order and every other naming of up to `MAX_MOVES` moves; none when there are more."""
    known = sorted({m.casefold() for m in moves})
    if not 2 <= len(known) <= MAX_MOVES or not all(re.search(r"\w", m) for m in known):
        return []
    orders = [dict(zip(known, p, strict=True)) for p in itertools.permutations(known) if list(p) != known]
    return [Relabelling(kind=kind, names=names) for kind in ("order", "label") for names in orders]


def _words(names: Mapping[str, str]) -> re.Pattern[str]:
    return re.compile(rf"(?<!\w)(?:{_either(names)})(?!\w)", re.IGNORECASE)


def _offer(names: Mapping[str, str]) -> re.Pattern[str]:
    move = f"(?:{_either(names)})"
    chosen_from = rf"(?<!\w){move}(?:(?:, | / |/){move})*,? or {move}(?!\w)"
    return re.compile(rf"{chosen_from}|(?<=Legal moves: ){move}(?:, {move})*(?!\w)", re.IGNORECASE)


def _either(names: Mapping[str, str]) -> str:
    return "|".join(re.escape(n) for n in sorted(names, key=len, reverse=True))


def _like(old: str, new: str) -> str:
    """``new`` written as ``old`` was: in capitals, with a capital, or neither."""
    if len(old) > 1 and old.isupper():
        return new.upper()
    return new[:1].upper() + new[1:] if old[:1].isupper() else new
