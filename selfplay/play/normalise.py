"""From what an environment returned to plain checked data. Every fault is a ValueError that names the field."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from numbers import Integral, Real
from typing import Any

from selfplay.environment import Environment, Outcome
from selfplay.play.text import clean
from selfplay.types import Scalar

_ZERO_SUM_TOLERANCE = 1e-5
"""Rewards may come from float32 arithmetic."""


def checked_outcome(environment: Environment, outcome: object) -> Outcome:
    """The outcome with rewards as floats within the declared range, seats by name, winners in seat order."""
    if not isinstance(outcome, Outcome):
        raise ValueError(f"outcome() returned {_short(outcome)}, expected an Outcome")
    seats = tuple(environment.seats)
    rewards = checked_rewards(environment, outcome.rewards)
    won = {seat_name(w, seats, "winners") for w in outcome.winners}
    return Outcome(
        rewards=rewards,
        winners=tuple(s for s in seats if s in won),
        reason=clean(str(outcome.reason)),
        info=checked_info(outcome.info),
    )


def checked_info(info: Mapping[Any, Any]) -> dict[str, Scalar]:
    """Plain values by text; keys of any kind become text, and two that become the same are a fault."""
    out: dict[str, Scalar] = {}
    for key, value in info.items():
        name = clean(str(key))
        if name in out:
            raise ValueError(f"info names {name!r} twice (keys {list(info)!r})")
        out[name] = scalar(value, f"info[{key!r}]")
    return out


def checked_rewards(environment: Environment, rewards: Mapping[Any, Any]) -> dict[str, float]:
    """Seat → reward for every seat, in seat order; integer keys are positions of seats."""
    seats = tuple(environment.seats)
    low, high = environment.reward_range
    out: dict[str, float] = {}
    for key, value in rewards.items():
        seat = key if key in seats else seat_name(key, seats, "rewards")
        if seat in out:
            raise ValueError(f"rewards name seat {seat!r} twice (keys {list(rewards)!r})")
        out[seat] = _reward(value, key, low, high)
    if len(out) < len(seats):
        missing = [s for s in seats if s not in out]
        raise ValueError(f"rewards lack {', '.join(map(repr, missing))}")
    total = sum(out.values())
    if environment.zero_sum and abs(total) > _ZERO_SUM_TOLERANCE * max(1.0, high - low):
        raise ValueError(
            f"rewards {out} sum to {total:g} although zero_sum is declared; set zero_sum = False if they may"
        )
    return {s: out[s] for s in seats}


def seat_name(key: object, seats: Sequence[str], field: str) -> str:
    """The seat that ``key`` names: its name, or its position as an integer."""
    if isinstance(key, str) and key in seats:
        return key
    if isinstance(key, Integral) and not isinstance(key, bool):
        if str(key) in seats:
            return str(key)
        if 0 <= int(key) < len(seats):
            return seats[int(key)]
    raise ValueError(f"{field}: {key!r} is not a seat; the seats are {', '.join(seats)}")


def scalar(value: object, field: str) -> Scalar:
    """A bool, 64-bit int, finite float or clean text; numpy scalars are taken by their value."""
    if not isinstance(value, bool | int | float | str) and hasattr(value, "item") and getattr(value, "ndim", 1) == 0:
        value = value.item()
    if isinstance(value, str):
        return clean(value)
    if isinstance(value, bool):
        return value
    if isinstance(value, int) and -(2**63) <= value < 2**63:
        return value
    if isinstance(value, float) and math.isfinite(value):
        return value
    raise ValueError(f"{field} is {_short(value)}, expected a bool, a 64-bit int, a finite float or text")


def _reward(value: object, key: object, low: float, high: float) -> float:
    if type(value) is not float:
        if not isinstance(value, Real) or isinstance(value, bool):
            raise ValueError(f"rewards[{key!r}] is {_short(value)}, expected a number")
        try:
            value = float(value)
        except OverflowError:
            raise ValueError(f"rewards[{key!r}] is {_short(value)}, too large for a reward") from None
    slack = _ZERO_SUM_TOLERANCE * max(1.0, abs(low), abs(high))
    if not low - slack <= value <= high + slack:  # also refuses NaN
        raise ValueError(f"rewards[{key!r}] is {value!r}, outside the declared range [{low:g}, {high:g}]")
    return value + 0.0  # −0.0 becomes 0.0


def _short(value: object) -> str:
    text = f"{value!r} ({type(value).__name__})"
    return text if len(text) <= 200 else text[:199] + "…"
