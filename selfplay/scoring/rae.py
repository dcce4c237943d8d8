"""Role-conditioned advantage estimation (Liu et al. 2025, "SPIRAL", arXiv:2506.24119): one running baseline per role.

In: whole episodes in the order they are trained on. Out: an advantage per trained seat. A role is (environment, agent,
seat), so agents of a zero-sum game and seats with a built-in edge are never compared with each other.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from selfplay.config.schema import AlgorithmConfig
from selfplay.scoring.algorithms import Role
from selfplay.types import Episode


class RoleConditioned:
    """advantage = reward − baseline; then baseline ← decay · baseline + (1 − decay) · reward, from 0.

    The baseline used is always the one *before* its update. A forfeit is a result of play: the offender is taught by
    its loss, and the others' wins belong to what their role earns. A truncated episode has no result: its advantages
    are 0 and no baseline moves, so that a cap never teaches anybody a loss that nobody suffered.
    """

    def __init__(self, config: AlgorithmConfig) -> None:
        self._decay = config.baseline_decay
        self._baselines: dict[Role, float] = {}

    def advantages(self, episodes: Sequence[Episode]) -> list[dict[str, float]]:
        """For each episode: trained seat → advantage. Moves the baselines."""
        return [self._episode(episode) for episode in episodes]

    def baselines(self) -> dict[Role, float]:
        """(environment, agent, seat) → baseline."""
        return dict(self._baselines)

    def state(self) -> dict[str, float]:
        """What `load_state` needs to go on; JSON-safe."""
        return {msgspec.json.encode(role).decode(): value for role, value in self._baselines.items()}

    def load_state(self, state: Mapping[str, float]) -> None:
        self._baselines = {msgspec.json.decode(key, type=Role): float(value) for key, value in state.items()}

    def _episode(self, episode: Episode) -> dict[str, float]:
        trained = [assignment for assignment in episode.match.seats if assignment.trained]
        if episode.ended == "truncated":
            return {assignment.seat: 0.0 for assignment in trained}
        return {a.seat: self._role((episode.match.env, a.agent, a.seat), episode.rewards[a.seat]) for a in trained}

    def _role(self, role: Role, reward: float) -> float:
        baseline = self._baselines.get(role, 0.0)
        self._baselines[role] = self._decay * baseline + (1.0 - self._decay) * reward
        return reward - baseline
