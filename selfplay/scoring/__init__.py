"""From played episodes to what a trainer consumes: screening, scores, advantages, segments."""

from selfplay.scoring.algorithms import Algorithm, load_algorithm
from selfplay.scoring.credit import turn_credit
from selfplay.scoring.scorers import Panel, Scorer, ScorerContext, Scores, load_panel, scores_fault
from selfplay.scoring.screening import Unusable, why_unusable
from selfplay.scoring.segments import (
    Advantage,
    action_counts,
    agents_with_signal,
    episode_segments,
    sequence_counts,
)

__all__ = [
    "Advantage",
    "Algorithm",
    "Panel",
    "Scorer",
    "ScorerContext",
    "Scores",
    "Unusable",
    "action_counts",
    "agents_with_signal",
    "episode_segments",
    "load_algorithm",
    "load_panel",
    "scores_fault",
    "sequence_counts",
    "turn_credit",
    "why_unusable",
]
