"""Anybody's algorithm, held to what the protocol says: a fault of its code ends as one line that names it and the place.

In: an object of `selfplay.scoring.algorithms.Algorithm`. Out: the same, whose advantages fit the episodes and whose state fits
a checkpoint; else `RunError`, before anything is trained on or saved.
"""

from __future__ import annotations

import math
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import msgspec

from selfplay.errors import RunError, SelfplayError
from selfplay.registry.entries import one_line
from selfplay.scoring.segments import Advantage
from selfplay.types import Episode

T = TypeVar("T")


class CheckedAlgorithm:
    """``inner``, called ``label`` in messages."""

    def __init__(self, inner: Any, label: str) -> None:
        self.inner, self._label = inner, label

    def advantages(self, episodes: Sequence[Episode]) -> list[dict[str, Advantage]]:
        """Those of ``inner``: one mapping per episode, every trained seat in it, one finite number or one per turn of the seat."""
        found = self._ask("advantages", lambda: [_plain(a) for a in self.inner.advantages(episodes)])
        if len(found) != len(episodes):
            raise self._fault(f"advantages gave {len(found)} mappings for {len(episodes)} episodes")
        for episode, advantages in zip(episodes, found, strict=True):
            for seat in (a.seat for a in episode.match.seats if a.trained):
                if seat not in advantages:
                    raise self._fault(f"advantages left out the trained seat {seat!r} of {episode.episode_id}")
                if problem := _problem(advantages[seat], sum(t.seat == seat for t in episode.turns)):
                    raise self._fault(f"the advantage of seat {seat!r} of {episode.episode_id} is {problem}")
        return found

    def state(self) -> dict[str, float]:
        """That of ``inner``, as a checkpoint will give it back."""

        def fit() -> dict[str, float]:
            return msgspec.json.decode(msgspec.json.encode(self.inner.state()), type=dict[str, float])

        return self._ask("state", fit)

    def load_state(self, state: Mapping[str, float]) -> None:
        """Only with what `state` gave before."""
        self._ask("load_state", lambda: self.inner.load_state(state))

    def _ask(self, method: str, call: Callable[[], T]) -> T:
        try:
            return call()
        except SelfplayError:
            raise
        except Exception as e:  # the boundary to other people's code: anything may be raised there
            raise self._fault(f"{method} raised {one_line(e)} ({_place(e)})") from e

    def _fault(self, what: str) -> RunError:
        return RunError(f"{self._label}: {what}")


def _plain(advantages: Mapping[str, Any]) -> dict[str, Advantage]:
    """With arrays and scalars of other libraries as Python's own."""
    return {seat: a.tolist() if hasattr(a, "tolist") else a for seat, a in advantages.items()}


def _problem(advantage: Any, num_turns: int) -> str:
    """What is wrong with one seat's advantage, or nothing."""
    values = [advantage] if isinstance(advantage, int | float) else advantage
    if (
        not isinstance(values, Sequence)
        or isinstance(values, str)
        or not all(isinstance(v, int | float) for v in values)
    ):
        return f"a {type(advantage).__name__}, neither a number nor one per turn"
    if values is advantage and len(values) != num_turns:
        return f"{len(values)} numbers for {num_turns} turns"
    return next((f"{v}, which is no finite number" for v in values if not math.isfinite(v)), "")


def _place(error: BaseException) -> str:
    """The file and line that raised it."""
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return f"{frame.filename}:{frame.lineno}"
