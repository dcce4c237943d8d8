"""Strategies of Axelrod's tournaments for the iterated prisoner's dilemma, read from what a seat is shown."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Mapping

from selfplay.agent import Decision

COOPERATE, DEFECT = "cooperate", "defect"
_ROUND = re.compile(r"you (cooperate|defect), other (cooperate|defect)")
Round = tuple[str, str]
"""(own choice, the other's choice)."""


def _reading(choose: Callable[[list[Round], random.Random], str]) -> Callable[[Decision, random.Random], str]:
    def strategy(decision: Decision, rng: random.Random) -> str:
        return choose(_ROUND.findall(decision.view), rng)

    return strategy


def _tit_for_tat(past: list[Round], _rng: random.Random) -> str:
    return past[-1][1] if past else COOPERATE


def _grim(past: list[Round], _rng: random.Random) -> str:
    return DEFECT if any(other == DEFECT for _, other in past) else COOPERATE


def _win_stay_lose_shift(past: list[Round], _rng: random.Random) -> str:
    """Repeat the own choice after 3 or 5 points, change it after 0 or 1 (Nowak and Sigmund, 1993)."""
    if not past:
        return COOPERATE
    own, other = past[-1]
    return own if other == COOPERATE else (DEFECT if own == COOPERATE else COOPERATE)


def _generous(past: list[Round], rng: random.Random) -> str:
    """Tit for tat that forgives one defection in three (Nowak and Sigmund, 1992, for the payoffs 5, 3, 1, 0)."""
    return DEFECT if past and past[-1][1] == DEFECT and rng.random() >= 1 / 3 else COOPERATE


STRATEGIES: Mapping[str, Callable[[Decision, random.Random], str]] = {
    "tit-for-tat": _reading(_tit_for_tat),
    "grim": _reading(_grim),
    "win-stay-lose-shift": _reading(_win_stay_lose_shift),
    "generous": _reading(_generous),
    "cooperate": lambda _decision, _rng: COOPERATE,
    "defect": lambda _decision, _rng: DEFECT,
}
