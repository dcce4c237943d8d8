"""Who may start and when a step may train: arithmetic that bounds staleness instead of tuning it.

    started − lost  ≤  max_started = (published + depth + 1) · batch          gate of new matches
    a step waits for episodes in flight whose staleness is `depth` already     gate of a step

Why no trained episode is ever staler than ``depth``: an episode that began when ``s`` steps were published has
staleness at most ``k − s`` at step ``k`` (an agent gains at most one version a step). Those that may not be left over by
step ``k`` began at ``s ≤ k − depth``. By the first gate at most ``(k + 1) · batch`` episodes had begun by then, and
``k · batch`` are trained: so at most ``batch`` are due, the step takes the stalest first, and the second gate makes it
wait for those not finished. Frozen opponents do not age. Episodes that fail, are void or are dropped leave the count,
and what is started in their place begins later.
"""

from __future__ import annotations

from collections.abc import Iterable


def max_started(steps_published: int, depth: int, batch: int, total_steps: int | None = None) -> int:
    """Most episodes that may have been started, without those lost, once ``steps_published`` steps are current on every engine.

    ``total_steps`` caps it, so that a run does not play what it will never train on.
    """
    ahead = steps_published + depth + 1
    return (ahead if total_steps is None else min(ahead, total_steps)) * batch


def startable(
    *,
    steps_published: int,
    depth: int,
    batch: int,
    trained: int,
    waiting: int,
    in_flight: int,
    total_steps: int | None = None,
) -> int:
    """How many matches may start now: the bound less episodes trained, waiting in the buffer, and being played."""
    return max(0, max_started(steps_published, depth, batch, total_steps) - trained - waiting - in_flight)


def deepest_lag(depth: int) -> int:
    """The largest staleness an episode can have when it is trained on."""
    return depth


def is_due(staleness: int, depth: int) -> bool:
    """Whether an episode of this staleness has to be in the very next step."""
    return staleness >= depth


def may_train(*, waiting: int, batch: int, depth: int, in_flight_staleness: Iterable[int]) -> bool:
    """Whether a step may start: enough episodes wait, and none still being played is due.

    ``in_flight_staleness`` counts from the versions that were current when each match began. With depth 0 every episode
    is due, so the step waits for all of them.
    """
    return waiting >= batch and not any(is_due(staleness, depth) for staleness in in_flight_staleness)
