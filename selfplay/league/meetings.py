"""Who was drawn as an opponent how often, beside how often the rule would have it.

In: every draw with the chances it was made with. Out: sums per (learner, rule, opponent), added up in ``league.sqlite`` and shown by
``selfplay runs show``. A draw is counted when it is made; a match that is played again keeps its draw.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import msgspec


class Meeting(msgspec.Struct, kw_only=True):
    """Draws of one opponent by one rule."""

    agent: str
    rule: str
    opponent: str
    met: int = 0
    expected: float = 0.0
    """Sum of the chances it had."""
    variance: float = 0.0
    """Sum of p (1 − p)."""

    @property
    def surprise(self) -> float:
        """Standard deviations between what came and what the rule would have; 0 where nothing was left to chance."""
        return (self.met - self.expected) / math.sqrt(self.variance) if self.variance > 0 else 0.0


class Meetings:
    """Sums of the draws since the last `pop`."""

    def __init__(self) -> None:
        self._found: dict[tuple[str, str, str], Meeting] = {}

    def add(self, agent: str, rule: str, chosen: str, chances: Mapping[str, float] | None = None) -> None:
        """One draw; without ``chances`` nobody else could be drawn."""
        for opponent, chance in (chances or {chosen: 1.0}).items():
            key = (agent, rule, opponent)
            at = self._found.setdefault(key, Meeting(agent=agent, rule=rule, opponent=opponent))
            at.met += opponent == chosen
            at.expected += chance
            at.variance += chance * (1 - chance)

    def pop(self) -> list[Meeting]:
        """What was added, and begin anew."""
        found, self._found = list(self._found.values()), {}
        return found
