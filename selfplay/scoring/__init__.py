"""From played episodes to what a trainer consumes: screening, advantages, segments."""

from selfplay.scoring.algorithms import Algorithm, load_algorithm
from selfplay.scoring.screening import Unusable, why_unusable
from selfplay.scoring.segments import Advantage, action_counts, agents_with_signal, episode_segments

__all__ = [
    "Advantage",
    "Algorithm",
    "Unusable",
    "action_counts",
    "agents_with_signal",
    "episode_segments",
    "load_algorithm",
    "why_unusable",
]
