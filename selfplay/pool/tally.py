"""Who plays for a run: its own workers and remote pools, and how much of the games each has brought.

In: every whole episode, with who played it. Out: the figures of a step's report.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from selfplay.pool.workers import Guest, WorkerHandle


class Tally:
    """Games since it was last asked, the first time since the first game. ``monotonic`` gives seconds."""

    def __init__(self, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._now = monotonic
        self._since: float | None = None
        self._local = self._remote = 0

    def count(self, player: WorkerHandle | Guest) -> None:
        """A whole episode came from ``player``."""
        if self._since is None:
            self._since = self._now()
        if isinstance(player, WorkerHandle):
            self._local += 1
        else:
            self._remote += 1

    def taken(self, workers: Sequence[WorkerHandle], guests: Sequence[Guest]) -> dict[str, float]:
        """The figures since the last call, and who takes part now. ``share`` is of the games; slots are games at once."""
        now, games = self._now(), self._local + self._remote
        took_s = now - (now if self._since is None else self._since)
        figures = {
            "workers": sum(w.ready for w in workers), "remote_pools": len(guests),
            "slots": sum(w.slots for w in workers if w.ready), "remote_slots": sum(g.slots for g in guests),
            "games": games, "remote_games": self._remote, "remote_share": self._remote / max(1, games),
            "remote_episodes_per_s": self._remote / took_s if took_s else 0.0,
        }  # fmt: skip
        self._since, self._local, self._remote = now, 0, 0
        return figures
