"""Werewolf: the seer says what it knows, and everybody votes for whom most have suspected."""

from __future__ import annotations

import random
import re
from collections import Counter
from collections.abc import Callable, Mapping

from selfplay.agent import Decision

_KNOWN = re.compile(r"(\w+) is a (wolf|seer|villager)")
_SUSPECTED = re.compile(r"suspects (\w+)")


def _follow(decision: Decision, rng: random.Random) -> str:
    legal = list(decision.legal_moves or ())
    known = dict(_KNOWN.findall(decision.view.partition("You know: ")[2]))
    am_wolf = ", a wolf." in decision.rules
    if "It is night" in decision.view:
        fresh = [s for s in legal if s not in known]
        return rng.choice(fresh or legal)
    if not am_wolf and (wolves := [s for s in legal if known.get(s) == "wolf"]):
        return wolves[0]
    named: Counter[str] = Counter(s for s in _SUSPECTED.findall(decision.view) if s in legal)
    if "Vote:" in decision.view and named:
        return named.most_common(1)[0][0]
    cleared = {s for s, role in known.items() if role != "wolf"} if not am_wolf else set()
    mates = {s for s, role in known.items() if role == "wolf"} if am_wolf else set()
    return rng.choice([s for s in legal if s not in cleared | mates] or legal)


STRATEGIES: Mapping[str, Callable[[Decision, random.Random], str]] = {"follow": _follow}
