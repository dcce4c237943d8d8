"""Turn-level credit: from one advantage of a seat to one for each of its turns.

In: an episode, the advantages of its seats, the settings. Out: the same with a list per seat where turns differ.
"""

from __future__ import annotations

from collections.abc import Mapping

from selfplay.config.schema import AlgorithmConfig
from selfplay.scoring.segments import Advantage
from selfplay.types import Episode


def turn_credit(episode: Episode, advantages: Mapping[str, Advantage], config: AlgorithmConfig) -> dict[str, Advantage]:
    """Spread each seat's advantage A over its n turns: turn t gets discount^(n−1−t) · A.

    A turn without a legal move costs ``illegal_penalty``: itself, not the turns before it. Advantages that an algorithm
    gave per turn are discounted likewise. A truncated episode has no result and stays as it is.
    """
    plain = config.discount == 1.0 and not config.illegal_penalty
    if plain or episode.ended == "truncated":
        return dict(advantages)
    return {seat: _seat(episode, seat, value, config) for seat, value in advantages.items()}


def _seat(episode: Episode, seat: str, value: Advantage, config: AlgorithmConfig) -> list[float]:
    legal = [t.legal for t in episode.turns if t.seat == seat]
    num = len(legal)
    per_turn = [float(value)] * num if isinstance(value, int | float) else list(value)
    discounted = [a * config.discount ** (num - 1 - t) for t, a in enumerate(per_turn)]
    return [a - (0.0 if ok else config.illegal_penalty) for a, ok in zip(discounted, legal, strict=True)]
