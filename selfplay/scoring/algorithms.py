"""The algorithm seam: rewards in, advantages out, chosen by name among the entry points ``selfplay.algorithms``.

    algorithm = load_algorithm(config.algorithm)
    for episode, advantages in zip(episodes, algorithm.advantages(episodes)):
        segments += episode_segments(episode, advantages)

An entry point names a callable that takes the `AlgorithmConfig`. Only the chosen one is imported.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol, runtime_checkable

from selfplay.config.schema import AlgorithmConfig
from selfplay.errors import UserError
from selfplay.registry import ALGORITHMS, find_entry, load_entry
from selfplay.scoring.segments import Advantage
from selfplay.types import Episode


@runtime_checkable
class Algorithm(Protocol):
    """Credit assignment. Calls come in training order; the state goes into every checkpoint."""

    def advantages(self, episodes: Sequence[Episode]) -> Sequence[Mapping[str, Advantage]]:
        """For each episode: every trained seat → one advantage, or one per turn of the seat."""
        ...

    def state(self) -> dict[str, float]:
        """JSON-safe state, for `load_state`."""
        ...

    def load_state(self, state: Mapping[str, float]) -> None: ...


def load_algorithm(config: AlgorithmConfig) -> Algorithm:
    """The algorithm that ``config.name`` names.

    Raises `UnknownNameError` with the nearest names, and `UserError` when two distributions offer the name, when it
    cannot be imported, or when it is no algorithm.
    """
    entry = find_entry(ALGORITHMS, config.name)
    make = load_entry(entry)
    algorithm = make(config) if callable(make) else None
    if not isinstance(algorithm, Algorithm):
        raise UserError(
            f"algorithm {entry.id!r} of {entry.source} ({entry.target}) needs the methods advantages, state and load_state"
        )
    return algorithm
