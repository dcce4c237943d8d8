"""The ledger of attempts: started = stored + in flight + failed + void + dropped, by reason, at every report.

    start ──► in flight ──┬─► stored ──┬─► trained
                          │            └─► dropped (evicted from the buffer, by reason)
                          ├─► dropped (finished, but not fit to be stored, by reason)
                          ├─► failed  (the environment raised, by reason)
                          └─► void    (infrastructure failed; played again as another attempt, by reason)

In flow the events of a run, out flow `Accounting` reports. Every attempt is known by its episode id until it ends, so
an event that comes twice or from nowhere raises instead of being counted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import msgspec

from selfplay.errors import SelfplayError

Reasons = dict[str, int]


class AccountingError(SelfplayError):
    """The numbers do not add up, or an event names an attempt that is not in flight: a fault of the program itself."""


class Accounting(msgspec.Struct, frozen=True, kw_only=True):
    """One report. ``stored`` = ``trained`` + ``waiting``."""

    started: int
    stored: int
    in_flight: int
    failed: Reasons
    void: Reasons
    dropped: Reasons
    trained: int
    waiting: int

    def equation(self) -> str:
        """The sum in words, as shown to people."""
        return (
            f"started {self.started} = stored {self.stored} + in flight {self.in_flight} + failed {sum(self.failed.values())}"
            f" + void {sum(self.void.values())} + dropped {sum(self.dropped.values())}"
        )


class LedgerState(msgspec.Struct, frozen=True, kw_only=True):
    """A ledger as a checkpoint keeps it."""

    started: int = 0
    trained: int = 0
    waiting: int = 0
    in_flight: tuple[str, ...] = ()
    failed: Reasons = {}
    void: Reasons = {}
    dropped: Reasons = {}


class Ledger:
    """Counts every attempt exactly once."""

    def __init__(self, state: LedgerState | None = None) -> None:
        state = state or LedgerState()
        self._started, self._trained, self._waiting = state.started, state.trained, state.waiting
        self._in_flight = dict.fromkeys(state.in_flight)
        self._failed, self._void, self._dropped = Counter(state.failed), Counter(state.void), Counter(state.dropped)

    def start(self, episode_id: str) -> None:
        """A match was handed out."""
        if episode_id in self._in_flight:
            raise AccountingError(f"episode {episode_id} was started twice")
        self._started += 1
        self._in_flight[episode_id] = None

    def store(self, episode_id: str) -> None:
        """The episode came whole and is safe on disk and in the buffer."""
        self._end(episode_id, "stored")
        self._waiting += 1

    def fail(self, episode_id: str, reason: str) -> None:
        """The environment raised; the match will not be played again."""
        self._end(episode_id, "failed")
        self._failed[_checked(reason)] += 1

    def void(self, episode_id: str, reason: str) -> None:
        """Infrastructure failed: never a played result."""
        self._end(episode_id, "void")
        self._void[_checked(reason)] += 1

    def drop(self, episode_id: str, reason: str) -> None:
        """The episode came, and was put aside instead of being stored."""
        self._end(episode_id, "dropped")
        self._dropped[_checked(reason)] += 1

    def train(self, num: int) -> None:
        """``num`` stored episodes went into an optimizer step."""
        self._leave_buffer(num)
        self._trained += num

    def evict(self, num: int, reason: str) -> None:
        """``num`` stored episodes left the buffer untrained."""
        self._leave_buffer(num)
        self._dropped[_checked(reason)] += num

    def is_in_flight(self, episode_id: str) -> bool:
        return episode_id in self._in_flight

    @property
    def in_flight(self) -> tuple[str, ...]:
        """Episode ids being played, in the order they started."""
        return tuple(self._in_flight)

    def void_all(self, reason: str, except_for: Iterable[str] = ()) -> tuple[str, ...]:
        """Void everything in flight (the processes that played it are gone); returns the episode ids."""
        keep = set(except_for)
        lost = tuple(e for e in self._in_flight if e not in keep)
        for episode_id in lost:
            self.void(episode_id, reason)
        return lost

    def report(self) -> Accounting:
        return Accounting(
            started=self._started, stored=self._trained + self._waiting, in_flight=len(self._in_flight),
            failed=dict(self._failed), void=dict(self._void), dropped=dict(self._dropped),
            trained=self._trained, waiting=self._waiting,
        )  # fmt: skip

    def check(self, *, waiting: int | None = None, in_flight: int | None = None) -> Accounting:
        """The report, after proving that it adds up; raises `AccountingError` with the numbers.

        ``waiting`` and ``in_flight`` are counted independently: the buffer's length and the leases the pools hold.
        """
        report = self.report()
        ends = sum(sum(reasons.values()) for reasons in (report.failed, report.void, report.dropped))
        if report.started != report.stored + report.in_flight + ends:
            raise AccountingError(f"episodes are missing: {report.equation()}")
        if waiting is not None and waiting != report.waiting:
            raise AccountingError(f"the ledger has {report.waiting} episodes waiting, the buffer holds {waiting}")
        if in_flight is not None and in_flight != report.in_flight:
            raise AccountingError(f"the ledger has {report.in_flight} episodes in flight, the pools hold {in_flight}")
        return report

    def snapshot(self) -> LedgerState:
        """Everything needed to go on counting after a resume."""
        return LedgerState(
            started=self._started, trained=self._trained, waiting=self._waiting, in_flight=tuple(self._in_flight),
            failed=dict(self._failed), void=dict(self._void), dropped=dict(self._dropped),
        )  # fmt: skip

    def _end(self, episode_id: str, how: str) -> None:
        if episode_id not in self._in_flight:
            raise AccountingError(f"episode {episode_id} cannot be {how}: it is not in flight")
        del self._in_flight[episode_id]

    def _leave_buffer(self, num: int) -> None:
        if not 0 <= num <= self._waiting:
            raise AccountingError(f"{num} episodes cannot leave a buffer of {self._waiting}")
        self._waiting -= num


def _checked(reason: str) -> str:
    if not reason or len(reason) > 100 or not reason.isprintable():
        raise AccountingError(f"{reason!r} is not a reason: a short printable class of fault is needed, not a message")
    return reason
