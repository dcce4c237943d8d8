"""Shares of games with their intervals.

In: how many of how many. Out: Wilson's interval, which stays within 0 and 1 and says something of 0 out of 10 too.
"""

from __future__ import annotations

import math

Z_95 = 1.959963984540054
"""Normal quantile of a two-sided 95 % interval."""


def wilson(points: float, num: int) -> tuple[float, float]:
    """Wilson's 95 % interval (1927) of a share of ``num`` games; with draws as half points it errs on the wide side."""
    share, z2 = points / num, Z_95**2
    centre = (share + z2 / (2 * num)) / (1 + z2 / num)
    half = Z_95 * math.sqrt(share * (1 - share) / num + z2 / (4 * num * num)) / (1 + z2 / num)
    return max(0.0, centre - half), min(1.0, centre + half)
