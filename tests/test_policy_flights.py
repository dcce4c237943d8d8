"""Answers in parts: spans cover every token once and in order, one budget, noise that is never used twice; and holds."""

from __future__ import annotations

import asyncio

from hypothesis import given
from hypothesis import strategies as st

from selfplay.agent import Sampling
from selfplay.policy.flights import AnswerParts, Flight, Flights
from selfplay.policy.versions import Installed
from selfplay.types import PolicyVersion, Span


def flight(version: int | None = 3, *marks: tuple[int, int], agent: str = "pro") -> Flight:
    entry = None if version is None else Installed(version=PolicyVersion(agent, version), name=f"{agent}@{version}#1")
    return Flight(agent=agent, pin="turn", entry=entry, request="g1", marks=list(marks))


def test_spans_of_one_part_by_hand() -> None:
    assert flight().spans(0) == []
    assert flight(None).spans(2) == [Span(0, 0, 2)]
    assert flight().spans(5) == [Span(3, 0, 5)]
    assert flight(3, (2, 4), (4, 5)).spans(5) == [Span(3, 0, 2), Span(4, 2, 4), Span(5, 4, 5)]
    assert flight(3, (0, 4)).spans(5) == [Span(4, 0, 5)], "swapped before its first token"
    assert flight(3, (6, 4)).spans(5) == [Span(3, 0, 5)], "ended before the first token of the new weights"


def test_parts_of_one_version_are_one_span() -> None:
    parts = AnswerParts()
    parts.add((1, 2), (-1.0, -1.0), [Span(3, 0, 2)])
    parts.add((3,), (-1.0,), [Span(3, 0, 1)])
    parts.add((4, 5), (-2.0, -2.0), [Span(3, 0, 1), Span(4, 1, 2)])
    assert (parts.ids, parts.spans) == ((1, 2, 3, 4, 5), (Span(3, 0, 4), Span(4, 4, 5)))


def test_what_is_left_of_the_budget_and_noise_of_its_own() -> None:
    parts, whole = AnswerParts(), Sampling(max_tokens=10, seed=5)
    assert parts.sampling(whole) == whole
    parts.add((1, 2, 3), (-1.0,) * 3, [Span(0, 0, 3)])
    rest = parts.sampling(whole)
    assert rest.max_tokens == 7
    assert rest.seed not in (None, 5)
    assert parts.sampling(Sampling(max_tokens=10)).seed is None


@given(st.lists(st.tuples(st.integers(0, 6), st.lists(st.integers(0, 9), max_size=3)), max_size=5))
def test_spans_cover_every_token_once_and_in_order(drawn: list[tuple[int, list[int]]]) -> None:
    parts, version = AnswerParts(), 0
    for num_tokens, at in drawn:
        marks = [(place, version + i + 1) for i, place in enumerate(sorted(at))]
        parts.add(range(num_tokens), [-1.0] * num_tokens, flight(version, *marks).spans(num_tokens))
        version += len(marks)
    edge = 0
    for span in parts.spans:
        assert span.start == edge < span.end
        edge = span.end
    assert edge == len(parts.ids) == len(parts.logprobs)
    assert [s.version for s in parts.spans] == sorted({s.version for s in parts.spans})


def test_a_hold_keeps_back_whom_it_names_until_it_is_released_or_forgotten() -> None:
    async def work() -> None:
        clock = [0.0]
        flights = Flights(lambda: clock[0])
        flights.hold(("pro",), 10.0)
        await flights.wait_for_turn("con")
        held = asyncio.create_task(flights.wait_for_turn("pro"))
        await asyncio.sleep(0.01)
        assert not held.done()
        flights.release()
        await held
        flights.hold((), 10.0)
        assert flights.is_holding
        clock[0] = 11.0
        await flights.wait_for_turn("anybody")
        assert not flights.is_holding

    asyncio.run(work())


def test_landed_waits_for_those_it_names() -> None:
    async def work() -> None:
        flights, ours, theirs = Flights(), flight(), flight(agent="con")
        flights.begin(ours)
        flights.begin(theirs)
        landed = asyncio.create_task(flights.landed(("pro",)))
        await asyncio.sleep(0)
        assert not landed.done()
        flights.end(ours)
        await landed
        assert flights.of(None) == [theirs]

    asyncio.run(work())
