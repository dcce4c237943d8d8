"""Liar's dice by the odds: believe a bid that is likely, raise as little as is likely, doubt the rest."""

from __future__ import annotations

import math
import random
import re
from collections.abc import Callable, Mapping

from selfplay.agent import Decision

_LEFT = re.compile(r"player_\d (\d+)")
DOUBT_BELOW = 0.35


def _odds(decision: Decision, _rng: random.Random) -> str:
    own, _, table = decision.view.partition(" Dice left: ")
    mine = [int(d) for d in re.findall(r"\d", own)]
    others = sum(int(n) for n in _LEFT.findall(table.partition(".")[0])) - len(mine)
    wild = "Ones count" in decision.rules

    def chance(bid: str) -> float:
        number, face = (int(n) for n in bid.split("x"))
        have = sum(d == face or (wild and d == 1) for d in mine)
        p = 2 / 6 if wild and face != 1 else 1 / 6
        need = max(0, number - have)
        return sum(math.comb(others, k) * p**k * (1 - p) ** (others - k) for k in range(need, others + 1))

    bids = [m for m in decision.legal_moves or () if m != "liar"]
    last = re.findall(r"player_\d (\d+x\d)", table.partition(" Bids: ")[2])
    if last and (not bids or chance(last[-1]) < DOUBT_BELOW):
        return "liar"
    best = max(bids[:12], key=chance)
    return "liar" if last and chance(best) < 1 - chance(last[-1]) else best


STRATEGIES: Mapping[str, Callable[[Decision, random.Random], str]] = {"odds": _odds}
