"""Advantages without groups: the bare reward, and REINFORCE++'s normalisation over the whole batch of an agent.

    reinforce      R                                             Williams 1992; the reference that baselines are measured against
    reinforce_pp   (R − mean) / std over the agent's batch        Hu et al. 2025, arXiv:2501.03262

Seats are not told apart, so an agent that plays an unfair seat learns from the seat's edge, too: use `rae` for games.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence

from selfplay.config.schema import AlgorithmConfig
from selfplay.types import Episode

MIN_STD = 1e-6


class Reinforce:
    """advantage = reward. Truncated episodes have no result and get 0."""

    def __init__(self, config: AlgorithmConfig) -> None:
        self._config = config

    def advantages(self, episodes: Sequence[Episode]) -> list[dict[str, float]]:
        """For each episode: trained seat → advantage."""
        return [
            {a.seat: 0.0 if e.ended == "truncated" else e.rewards[a.seat] for a in e.match.seats if a.trained}
            for e in episodes
        ]

    def state(self) -> dict[str, float]:
        """Nothing to remember."""
        return {}

    def load_state(self, state: Mapping[str, float]) -> None: ...


class ReinforcePlusPlus(Reinforce):
    """The rewards of an agent's trained seats, centred and scaled over the batch."""

    def advantages(self, episodes: Sequence[Episode]) -> list[dict[str, float]]:
        """For each episode: trained seat → advantage."""
        rewards: dict[str, list[float]] = defaultdict(list)
        counted = [e for e in episodes if e.ended != "truncated"]
        for e in counted:
            for a in e.match.seats:
                if a.trained:
                    rewards[a.agent].append(e.rewards[a.seat])
        moments = {agent: (statistics.fmean(r), statistics.pstdev(r)) for agent, r in rewards.items()}
        out = super().advantages(episodes)
        for e, values in zip(episodes, out, strict=True):
            for a in e.match.seats:
                if a.trained and e.ended != "truncated":
                    mean, std = moments[a.agent]
                    values[a.seat] = (e.rewards[a.seat] - mean) / std if std > MIN_STD else 0.0
        return out
