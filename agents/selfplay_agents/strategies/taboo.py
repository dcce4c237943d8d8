"""Taboo with a shared list of words: the giver says a word that leads to one card only, the guesser looks it up."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Mapping
from importlib import resources

from selfplay.agent import Decision


def _listed(decision: Decision, rng: random.Random) -> str:
    hints = _hints()
    if decision.legal_moves is None:
        word = decision.view.partition("Word: ")[2].partition(".")[0]
        said = decision.view.partition("Clues so far: ")[2].partition(".")[0].split(", ")
        return rng.choice([h for h in hints[word] if h not in said])
    clue = decision.view.partition("Clues so far: ")[2].partition(".")[0].split(", ")[-1]
    meant = [word for word in decision.legal_moves if clue in hints.get(word, ())]
    return meant[0] if meant else rng.choice(decision.legal_moves)


@functools.cache
def _hints() -> dict[str, tuple[str, ...]]:
    text = resources.files("selfplay_envs").joinpath("taboo_words.txt").read_text("utf-8")
    lines = [line for line in text.splitlines() if not line.startswith("#")]
    return {line.partition(":")[0]: tuple(line.partition(" | ")[2].split()) for line in lines}


STRATEGIES: Mapping[str, Callable[[Decision, random.Random], str]] = {"listed": _listed}
