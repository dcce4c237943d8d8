"""Named waits, the two length distributions, and how a batch ended."""

from __future__ import annotations

import asyncio

from hypothesis import given
from hypothesis import strategies as st

from episode_samples import episode
from selfplay.controller.lengths import Lengths
from selfplay.controller.report import batch_figures
from selfplay.controller.waits import Waits


def test_a_wait_is_woken_by_a_change_and_says_what_it_waits_for() -> None:
    async def work() -> list[str]:
        clock = [0.0]
        waits, ready, seen = Waits(lambda: clock[0]), [False], list[str]()
        first = asyncio.create_task(waits.until("room in the buffer", lambda: ready[0]))
        await asyncio.sleep(0)
        clock[0] = 5.0
        second = asyncio.create_task(waits.until("a free slot", lambda: ready[0]))
        await asyncio.sleep(0)
        clock[0] = 12.0
        seen.append(waits.describe())
        await waits.notify()
        await asyncio.sleep(0)
        assert not first.done()
        ready[0] = True
        await waits.notify()
        await asyncio.gather(first, second)
        await waits.until("what is there already", lambda: True)
        return [*seen, waits.describe()]

    assert asyncio.run(work()) == ["room in the buffer (12 s); a free slot (7 s)", "nothing"]


def test_a_cancelled_wait_is_forgotten() -> None:
    async def work() -> str:
        waits = Waits()
        task = asyncio.create_task(waits.until("nothing that comes", lambda: False))
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        return waits.describe()

    assert asyncio.run(work()) == "nothing"


def test_lengths_by_hand() -> None:
    lengths = Lengths()
    assert lengths.figures() == {"num": 0.0}
    for length in (3, 1, 2, 10):
        lengths.add(length)
    assert lengths.figures() == {"num": 4.0, "mean": 4.0, "p10": 1.0, "p50": 2.0, "p90": 10.0}


def test_games_cut_short_are_nobodys_wins_and_no_draws() -> None:
    nothing = {"pro": 0.0, "con": 0.0}
    cut = [episode(i, ended="truncated", rewards=nothing, winners=()) for i in range(2)]
    figures = batch_figures([episode(2), episode(3, rewards=nothing, winners=()), *cut])
    assert figures["win_share"] == {"con": 0.0, "pro": 0.25, "draw": 0.25}
    assert figures["ended"] == {"natural": 0.5, "forfeit": 0.0, "truncated": 0.5}


@given(st.lists(st.integers(0, 50), min_size=1))
def test_quantiles_are_values_in_order(values: list[int]) -> None:
    lengths = Lengths()
    for value in values:
        lengths.add(value)
    figures = lengths.figures()
    assert min(values) <= figures["p10"] <= figures["p50"] <= figures["p90"] <= max(values)
    assert sum(v <= figures["p50"] for v in values) * 2 >= len(values)
