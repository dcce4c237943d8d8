"""Figures as text, the same in the terminal and in the report.

In: rows of `Standings`. Out: short texts.
"""

from __future__ import annotations

from selfplay.ratings import PlayerRating, RatingTable
from selfplay.tournament.standings import MeanReward, Share

VAGUE = 1000.0
"""Elo to either side from which on an interval says nothing."""


def counted(number: int, noun: str) -> str:
    """``1 pair``, ``2 pairs``."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def rank_text(row: PlayerRating) -> str:
    """``2`` or ``1–3``: the ranks that the games leave open; a dash without games."""
    if not row.games:
        return "–"
    return str(row.rank_low) if row.rank_low == row.rank_high else f"{row.rank_low}–{row.rank_high}"


def elo_text(value: float | None) -> str:
    """``+12``; a dash where there is none."""
    return "–" if value is None else f"{round(value):+d}"


def interval_text(row: PlayerRating) -> str:
    """``-12 … +30``; ``anchor`` for who sets the scale; an open end where the record has none."""
    if row.low is None or row.high is None:
        return "–"
    if row.low == row.high:
        return "anchor"
    low = "-∞" if any("no lower bound" in f for f in row.flags) else elo_text(row.low)
    high = "+∞" if any("no upper bound" in f for f in row.flags) else elo_text(row.high)
    return f"{low} … {high}"


def reward_text(reward: MeanReward, digits: int = 2) -> str:
    """``+0.12 ± 0.05``."""
    return f"{reward.mean:+.{digits}f}" + ("" if reward.half is None else f" ± {reward.half:.{digits}f}")


def share_text(share: Share) -> str:
    """``0.980 (0.950 to 0.992)``."""
    return f"{share.share:.3f} ({share.low:.3f} to {share.high:.3f})"


def seat_texts(ratings: RatingTable) -> list[str]:
    """Per seat but the last: what it is worth between equals, or that so few games do not tell."""
    out = []
    for elo, low, high in list(zip(ratings.seat_effects, ratings.seat_low, ratings.seat_high, strict=True))[:-1]:
        known = max(elo - low, high - elo) < VAGUE
        out.append(
            f"{elo_text(elo)} Elo ({elo_text(low)} … {elo_text(high)})" if known else "not known from these games"
        )
    return out
