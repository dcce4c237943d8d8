"""The nouns: plain frozen data, no behaviour beyond reading itself."""

from selfplay.types.episode import Ended, Episode, JuryRecord, Segment, Span, StopReason, Turn, episode_faults
from selfplay.types.match import (
    BASE,
    Limits,
    Match,
    PolicyVersion,
    Scalar,
    SeatAssignment,
    check_name,
    derive_seed,
)

__all__ = [
    "BASE",
    "Ended",
    "Episode",
    "JuryRecord",
    "Limits",
    "Match",
    "PolicyVersion",
    "Scalar",
    "SeatAssignment",
    "Segment",
    "Span",
    "StopReason",
    "Turn",
    "check_name",
    "derive_seed",
    "episode_faults",
]
