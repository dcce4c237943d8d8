"""Who may start and when a step may train: arithmetic that bounds staleness instead of tuning it.

    started − lost  ≤  max_started = (published + depth + 1) · batch                      gate of new matches
    a step waits for an episode in flight that could otherwise come too late              gate of a step

Why no trained episode is ever staler than ``depth``. Staleness grows by at most one a step, so an episode of staleness
``a`` has to be trained within ``depth − a`` more steps. Steps take the stalest first; the ``i``-th stalest of what a
step leaves over is trained ``i // batch + 1`` steps later at the earliest, so all can be in time when ``a + i // batch``
is below ``depth`` for each. The first gate leaves at most ``(depth + 1) · batch`` episodes to be trained, which a step of
the stalest always keeps so; it can only be broken by a step that takes fresh episodes while stale ones are still being
played, and that step waits for them. Frozen opponents do not age. Episodes that fail, are void or are dropped leave the
count, and what is started in their place begins later.

An unbounded stream has the first gate only, with ``max_staleness`` for ``depth``: no more is started than could be trained
in time, a step waits for no game, and what comes too late all the same is dropped (`EpisodeBuffer.drop_stale`). Episodes are
atomic, so one count holds for all agents: an agent's version never runs ahead of the steps.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable


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


def may_train(
    *, batch: int, depth: int | None, waiting_staleness: Collection[int], in_flight_staleness: Iterable[int]
) -> bool:
    """Whether a step may start: enough episodes wait, and none still being played would come too late for it.

    ``in_flight_staleness`` counts from the versions that were current when each match began. With depth 0 the step waits
    for everything in flight; with depth None (an unbounded stream) for nothing. Episodes that already wait never hold a
    step up.
    """
    if len(waiting_staleness) < batch:
        return False
    if depth is None:
        return True
    left = [(age, False) for age in sorted(waiting_staleness, reverse=True)[batch:]]
    left += [(age, True) for age in in_flight_staleness]
    left.sort(reverse=True)
    return not any(in_flight and age + i // batch >= depth for i, (age, in_flight) in enumerate(left))
