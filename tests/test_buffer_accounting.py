"""The ledger: every attempt ends in exactly one place, and the sum is proven, not assumed."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from selfplay.buffer import AccountingError, Ledger, LedgerState


def test_the_sum_adds_up_with_reasons() -> None:
    ledger = Ledger()
    for i in range(8):
        ledger.start(f"{i}.0")
    for i in range(3):
        ledger.store(f"{i}.0")
    ledger.fail("3.0", "ValueError")
    ledger.void("4.0", "worker died")
    ledger.drop("5.0", "non-finite logprob")
    ledger.train(2)
    ledger.evict(1, "stale")
    report = ledger.check(waiting=0, in_flight=2)
    assert (report.started, report.stored, report.trained, report.in_flight) == (8, 2, 2, 2)
    assert report.dropped == {"non-finite logprob": 1, "stale": 1}
    assert report.equation() == "started 8 = stored 2 + in flight 2 + failed 1 + void 1 + dropped 2"
    assert (report.failed, report.void) == ({"ValueError": 1}, {"worker died": 1})


@pytest.mark.parametrize("event", ["store", "fail", "void", "drop"])
def test_an_attempt_ends_once(event: str) -> None:
    ledger = Ledger()
    ledger.start("0.0")
    ledger.store("0.0")
    with pytest.raises(AccountingError, match="not in flight"):
        getattr(ledger, event)("0.0", *(() if event == "store" else ("late",)))


def test_an_attempt_starts_once_while_in_flight() -> None:
    ledger = Ledger()
    ledger.start("0.0")
    with pytest.raises(AccountingError, match="started twice"):
        ledger.start("0.0")


def test_more_cannot_leave_the_buffer_than_is_in_it() -> None:
    with pytest.raises(AccountingError, match="1 episodes cannot leave a buffer of 0"):
        Ledger().train(1)


def test_missing_episodes_are_found_with_the_numbers() -> None:
    with pytest.raises(AccountingError, match="started 5 = stored 2 "):
        Ledger(LedgerState(started=5, trained=1, waiting=1)).check()


def test_the_ledger_is_compared_with_buffer_and_pools() -> None:
    ledger = Ledger()
    ledger.start("0.0")
    with pytest.raises(AccountingError, match="1 episodes in flight, the pools hold 0"):
        ledger.check(in_flight=0)
    with pytest.raises(AccountingError, match="0 episodes waiting, the buffer holds 3"):
        ledger.check(waiting=3)


@pytest.mark.parametrize("reason", ["", "x" * 200, "two\nlines", "\x1b[31mred"])
def test_reasons_are_short_printable_classes(reason: str) -> None:
    ledger = Ledger()
    ledger.start("0.0")
    with pytest.raises(AccountingError, match="not a reason"):
        ledger.fail("0.0", reason)


EVENTS = st.lists(
    st.tuples(st.sampled_from(["start", "store", "fail", "void", "drop", "train", "evict"]), st.integers(0, 5))
)


@given(EVENTS)
def test_whatever_happens_the_sum_holds_and_a_resume_goes_on_from_it(events: list[tuple[str, int]]) -> None:
    ledger = Ledger()
    for kind, i in events:
        try:
            if kind in ("start", "store"):
                getattr(ledger, kind)(f"{i}.0")
            elif kind == "train":
                ledger.train(i)
            elif kind == "evict":
                ledger.evict(i, "stale")
            else:
                getattr(ledger, kind)(f"{i}.0", "reason")
        except AccountingError:
            pass
        ledger.check()
    saved = msgspec.json.decode(msgspec.json.encode(ledger.snapshot()), type=LedgerState)
    assert Ledger(saved).check() == ledger.report()
    assert Ledger(saved).in_flight == ledger.in_flight
