"""How long the games are that were played, and how long those that were trained on: a bias would show between the two.

A rule that drops late games drops long ones, and a policy trained on what is left learns that games are short. In go
lengths (sampled tokens per episode), out come a few figures of each distribution.
"""

from __future__ import annotations

from collections import Counter

QUANTILES = (10, 50, 90)


class Lengths:
    """One distribution, kept as counts by length."""

    def __init__(self) -> None:
        self._counts: Counter[int] = Counter()

    def add(self, length: int) -> None:
        self._counts[length] += 1

    def figures(self) -> dict[str, float]:
        """``num``, ``mean`` and the quantiles ``p10``, ``p50``, ``p90`` (nearest rank); only ``num`` when it is empty."""
        num = self._counts.total()
        if not num:
            return {"num": 0.0}
        mean = sum(length * count for length, count in self._counts.items()) / num
        return {"num": float(num), "mean": mean} | {f"p{q}": float(self._quantile(q, num)) for q in QUANTILES}

    def _quantile(self, percent: int, num: int) -> int:
        rank, seen = max(1, -(-percent * num // 100)), 0
        for length in sorted(self._counts):
            seen += self._counts[length]
            if seen >= rank:
                return length
        raise AssertionError("a quantile is one of the values")
