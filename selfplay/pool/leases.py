"""Who holds which match, which results were handed on, and which are safe: the pool's books, without any I/O."""

from __future__ import annotations

from collections import Counter
from typing import Literal

from selfplay.pool.results import Held, Lease
from selfplay.types import Match

_ACKED_REMEMBERED = 4096

Standing = Literal["held", "delivered", "acked", "unknown"]


class Leases:
    """A match is *held* by a worker, then its result is *delivered* to the controller, then *acked* as durable.

    ``counts`` tells how many results came late, twice, or from a worker that did not hold the match.
    """

    def __init__(self) -> None:
        self._held: dict[str, Lease] = {}
        self._delivered: dict[str, str] = {}
        self._acked: dict[str, None] = {}
        self._num_held: Counter[str] = Counter()
        self.counts: Counter[str] = Counter()

    def grant(self, match: Match, worker: str, now: float) -> None:
        if match.episode_id in self._held or match.episode_id in self._delivered:
            raise ValueError(
                f"episode {match.episode_id} is already being played; another attempt needs another attempt id"
            )
        self._held[match.episode_id] = Lease(match=match, worker=worker, since=now)
        self._num_held[worker] += 1
        self.counts["granted"] += 1

    def of(self, worker: str) -> list[Lease]:
        return [lease for lease in self._held.values() if lease.worker == worker]

    def find(self, episode_id: str) -> Lease | None:
        return self._held.get(episode_id)

    def num_held(self, worker: str) -> int:
        return self._num_held[worker]

    def standing(self, episode_id: str, worker: str) -> Standing:
        """Where the episode stands from this worker's point of view."""
        lease = self._held.get(episode_id)
        if lease is not None and lease.worker == worker:
            return "held"
        if self._delivered.get(episode_id) == worker:
            return "delivered"
        return "acked" if episode_id in self._acked else "unknown"

    def deliver(self, episode_id: str) -> Lease:
        """The result of a held match goes to the controller; the worker's slot is free again."""
        lease = self._let_go(episode_id)
        self._delivered[episode_id] = lease.worker
        return lease

    def void(self, episode_id: str) -> Lease:
        """The worker is gone and nothing will come of this attempt."""
        lease = self._let_go(episode_id)
        self.counts["void"] += 1
        return lease

    def ack(self, episode_id: str) -> str | None:
        """The result is safe; returns the worker that waits to hear it, or None."""
        self._acked[episode_id] = None
        while len(self._acked) > _ACKED_REMEMBERED:
            del self._acked[next(iter(self._acked))]
        return self._delivered.pop(episode_id, None)

    def held(self, now: float) -> list[Held]:
        """All held matches, the oldest first."""
        leases = sorted(self._held.values(), key=lambda lease: lease.since)
        return [Held(episode_id=v.match.episode_id, worker=v.worker, age_s=now - v.since) for v in leases]

    def overdue(self, now: float, slack_s: float) -> list[Lease]:
        """Leases older than their match's time limit and ``slack_s``."""
        return [v for v in self._held.values() if now - v.since > v.match.limits.time_s + slack_s]

    def _let_go(self, episode_id: str) -> Lease:
        lease = self._held.pop(episode_id)
        self._num_held[lease.worker] -= 1
        if not self._num_held[lease.worker]:
            del self._num_held[lease.worker]  # every start of a worker has a name of its own
        return lease
