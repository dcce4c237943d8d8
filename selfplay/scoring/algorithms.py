"""The algorithm seam: rewards in, advantages out, chosen by name among the entry points ``selfplay.algorithms``.

    algorithm = load_algorithm(config.algorithm)
    for episode, advantages in zip(episodes, algorithm.advantages(episodes)):
        segments += episode_segments(episode, advantages)

An entry point names a callable that takes the `AlgorithmConfig`. Only the chosen one is imported.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol, runtime_checkable

import msgspec

from selfplay.config.schema import AlgorithmConfig
from selfplay.errors import UserError
from selfplay.registry import ALGORITHMS, find_entry, load_entry
from selfplay.registry.entries import one_line
from selfplay.scoring.checked import CheckedAlgorithm
from selfplay.scoring.segments import Advantage
from selfplay.types import Episode

Role = tuple[str, str, str]
"""(environment, agent, seat)."""


@runtime_checkable
class Algorithm(Protocol):
    """Credit assignment. Calls come in training order; the state goes into every checkpoint."""

    def advantages(self, episodes: Sequence[Episode]) -> Sequence[Mapping[str, Advantage]]:
        """For each episode: every trained seat → one advantage, or one per turn of the seat."""
        ...

    def state(self) -> dict[str, float]:
        """JSON-safe state, for `load_state`. A key that is a role, the JSON array [environment, agent, seat], is its agent's:
        when the agent is taken back to an earlier version, these go back with it. All other keys belong to nobody."""
        ...

    def load_state(self, state: Mapping[str, float]) -> None:
        """Go on from what `state` gave; not called where a run begins."""
        ...


def agent_part(state: Mapping[str, float], agent: str) -> dict[str, float]:
    """What of an algorithm's state is ``agent``'s: the entries whose key is one of its roles."""
    return {key: value for key, value in state.items() if _agent_of(key) == agent}


def with_agent_part(state: Mapping[str, float], agent: str, part: Mapping[str, float]) -> dict[str, float]:
    """``state`` with ``part`` in place of all that is ``agent``'s."""
    return {key: value for key, value in state.items() if _agent_of(key) != agent} | dict(part)


def _agent_of(key: str) -> str | None:
    try:
        return msgspec.json.decode(key, type=Role)[1]
    except msgspec.DecodeError:  # no role
        return None


def load_algorithm(config: AlgorithmConfig) -> CheckedAlgorithm:
    """The algorithm that ``config.name`` names, held to what `Algorithm` says.

    Raises `UnknownNameError` with the nearest names, and `UserError` when two distributions offer the name, when it
    cannot be imported or made, or when it is no algorithm.
    """
    entry = find_entry(ALGORITHMS, config.name)
    make, label = load_entry(entry), f"algorithm {entry.id!r} of {entry.source} ({entry.target})"
    try:
        algorithm = make(config) if callable(make) else None
    except UserError:
        raise
    except Exception as e:  # the boundary to other people's code: anything may be raised there
        raise UserError(f"{label} cannot be made: {one_line(e)}") from e
    if not isinstance(algorithm, Algorithm):
        raise UserError(f"{label} needs the methods advantages, state and load_state")
    return CheckedAlgorithm(algorithm, label)
