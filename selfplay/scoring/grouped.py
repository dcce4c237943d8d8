"""Advantages from groups: games of one scenario compared with each other, seat by seat.

A group is what one agent did at one seat of one environment with one seed: set ``algorithm.group`` so that every scenario
is played several times. Truncated episodes have no result: they get 0 and are in nobody's mean. A group of one, or one
whose rewards are all equal, carries no signal and gets 0.

    grpo      (R − mean) / std over the group                       Shao et al. 2024, arXiv:2402.03300
    dr_grpo   R − mean                                               Liu et al. 2025, arXiv:2503.20783
    rloo      R − mean of the others = (R − mean) · G / (G − 1)      Ahmadian et al. 2024, arXiv:2402.14740
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence

from selfplay.config.schema import AlgorithmConfig
from selfplay.errors import ConfigError
from selfplay.types import Episode

MIN_STD = 1e-6
Key = tuple[str, int, str, str]


class GroupRelative:
    """A stateless baseline from the batch itself; ``centred`` turns a group's rewards into advantages."""

    def __init__(self, config: AlgorithmConfig, centred: Callable[[Sequence[float]], list[float]]) -> None:
        if config.group < 2:
            raise ConfigError(
                f"algorithm.name={config.name} compares games of one scenario, and algorithm.group={config.group}: set it to 2 or more"
            )
        self._centred = centred

    def advantages(self, episodes: Sequence[Episode]) -> list[dict[str, float]]:
        """For each episode: trained seat → advantage."""
        out = [{a.seat: 0.0 for a in e.match.seats if a.trained} for e in episodes]
        groups: dict[Key, list[int]] = defaultdict(list)
        for i, episode in enumerate(episodes):
            if episode.ended != "truncated":
                for a in episode.match.seats:
                    if a.trained:
                        groups[episode.match.env, episode.match.seed, a.agent, a.seat].append(i)
        for (_, _, _, seat), members in groups.items():
            values = self._centred([episodes[i].rewards[seat] for i in members])
            for i, value in zip(members, values, strict=True):
                out[i][seat] = value
        return out

    def state(self) -> dict[str, float]:
        """Nothing to remember."""
        return {}

    def load_state(self, state: Mapping[str, float]) -> None: ...


def grpo(config: AlgorithmConfig) -> GroupRelative:
    """Group-relative policy optimisation: centred and scaled."""
    return GroupRelative(config, _scaled)


def dr_grpo(config: AlgorithmConfig) -> GroupRelative:
    """GRPO done right: centred only, so that easy and hard scenarios are not weighed by their spread."""
    return GroupRelative(config, _centred)


def rloo(config: AlgorithmConfig) -> GroupRelative:
    """REINFORCE leave-one-out: each against the mean of the others."""
    return GroupRelative(
        config, lambda rewards: [x * len(rewards) / max(1, len(rewards) - 1) for x in _centred(rewards)]
    )


def _centred(rewards: Sequence[float]) -> list[float]:
    mean = statistics.fmean(rewards)
    return [r - mean for r in rewards]


def _scaled(rewards: Sequence[float]) -> list[float]:
    std = statistics.pstdev(rewards)
    return [x / std if std > MIN_STD else 0.0 for x in _centred(rewards)]
