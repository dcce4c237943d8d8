"""Signalling by convention: the n-th object of the alphabet is the n-th word of the alphabet."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Mapping

from selfplay.agent import Decision

OBJECTS = ("apple", "boat", "chair", "drum", "egg", "fish", "gate", "hat")
SIGNALS = ("ka", "lo", "mi", "nu", "pe", "ra", "so", "tu")
_NOW = re.compile(r"(?:Object|Word): ([a-z]+)\.")


def _convention(decision: Decision, _rng: random.Random) -> str:
    (now,) = _NOW.findall(decision.view)
    legal = sorted(decision.legal_moves or ())
    known, named = (OBJECTS, SIGNALS) if now in OBJECTS else (SIGNALS, OBJECTS)
    return named[min(known.index(now), len(legal) - 1)]


STRATEGIES: Mapping[str, Callable[[Decision, random.Random], str]] = {"convention": _convention}
