"""Words of a tournament's options, read and checked.

In: what stands on the command line. Out: numbers and names. Raises `ConfigError` for what is neither.
"""

from __future__ import annotations

from selfplay.errors import ConfigError

MAX_ELO = 100_000


def read_anchors(words: tuple[str, ...]) -> dict[str, float]:
    """Player → Elo of every ``PLAYER=ELO``."""
    out: dict[str, float] = {}
    for word in words:
        name, _, value = word.rpartition("=")
        try:
            elo = float(value)
        except ValueError:
            name = ""
        if not name or not abs(elo) <= MAX_ELO:
            raise ConfigError(
                f"--anchor {word!r}: write PLAYER=ELO, for example random=0; Elo is at most {MAX_ELO:,} either way"
            )
        if out.setdefault(name, elo) != elo:
            raise ConfigError(f"--anchor: {name} is given two values, {out[name]:g} and {elo:g}")
    return out


def read_compare(text: str, schedule: str) -> tuple[str, ...]:
    """The two players whose difference matters, or nobody."""
    names = tuple(filter(None, (part.strip() for part in text.split(","))))
    if names and schedule != "active":
        raise ConfigError(f"--compare {text!r} is for --schedule active; {schedule} plays everybody alike")
    if text and len(set(names)) != 2:
        raise ConfigError(f"--compare {text!r}: name two players, A,B")
    return names


def read_numbers(option: str, text: str) -> tuple[float, float]:
    """The two numbers of ``0,20``."""
    try:
        low, high = (float(x) for x in text.split(","))
    except ValueError:
        raise ConfigError(f"{option} {text!r}: write two numbers, for example 0,20") from None
    return low, high


def read_seconds(text: str) -> float:
    """``90``, ``90s``, ``90m`` or ``2h`` in seconds."""
    units = {"s": 1.0, "m": 60.0, "h": 3600.0}
    scale = units.get(text[-1:], 0.0)
    try:
        value = float(text[:-1] if scale else text) * (scale or 1.0)
    except ValueError:
        value = -1.0
    if not 0 <= value < float("inf"):
        raise ConfigError(f"--budget-time {text!r}: write seconds, or a number with s, m or h, for example 90m")
    return value
