"""The slot gate: never more adapters than slots, first come first served, nobody starves."""

from __future__ import annotations

import asyncio
import random

from selfplay.policy.slots import SlotGate


async def spin() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


def test_never_more_live_adapters_than_slots_and_all_are_served() -> None:
    async def play() -> None:
        gate, live, most, served = SlotGate(2, max_overtakes=3), [], 0, 0
        rng = random.Random(0)

        async def request(name: str | None) -> None:
            nonlocal most, served
            async with gate.hold(name):
                live.append(name)
                most = max(most, len({n for n in live if n}))
                for _ in range(rng.randrange(4)):
                    await asyncio.sleep(0)
                live.remove(name)
                served += 1

        await asyncio.gather(*(request(rng.choice(["a", "b", "c", "d", None])) for _ in range(400)))
        assert (most, served, gate.num_live, gate.num_waiting) == (2, 400, 0, 0)

    asyncio.run(play())


def test_the_head_of_the_queue_is_overtaken_a_bounded_number_of_times() -> None:
    """Two adapters keep their slots busy for ever; a third one still gets its turn."""

    async def play() -> None:
        gate, order = SlotGate(2, max_overtakes=4), []
        releases: dict[int, asyncio.Event] = {}

        async def request(number: int, name: str) -> None:
            async with gate.hold(name):
                order.append((number, name))
                await releases.setdefault(number, asyncio.Event()).wait()

        tasks = [asyncio.create_task(request(i, n)) for i, n in enumerate(["a", "b"])]
        await spin()
        tasks.append(asyncio.create_task(request(2, "c")))
        await spin()
        for i in range(3, 13):
            tasks.append(asyncio.create_task(request(i, "ab"[i % 2])))
            await spin()
        assert len(order) == 2 + 4, "four overtook, the others stand in line"
        assert gate.num_waiting == 1 + 6
        for i, _ in list(order):
            releases[i].set()
        await spin()
        assert order[6] == (2, "c")
        while not all(t.done() for t in tasks):
            for event in releases.values():
                event.set()
            await spin()
        assert len(order) == 13

    asyncio.run(play())


def test_a_cancelled_waiter_leaves_no_trace() -> None:
    async def play() -> None:
        gate = SlotGate(1)

        async def request(name: str, entered: asyncio.Event, leave: asyncio.Event) -> None:
            async with gate.hold(name):
                entered.set()
                await leave.wait()

        events = [(asyncio.Event(), asyncio.Event()) for _ in range(4)]
        tasks = [asyncio.create_task(request(n, *e)) for n, e in zip("abab", events, strict=True)]
        await spin()
        assert [e[0].is_set() for e in events] == [True, False, True, False]
        tasks[1].cancel()  # the head of the queue
        await spin()
        assert gate.num_waiting == 1
        # Admitted and cancelled in the same turn of the loop.
        events[0][1].set()
        events[2][1].set()
        await asyncio.sleep(0)
        tasks[3].cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        assert (gate.num_live, gate.num_waiting) == (0, 0)

    asyncio.run(play())
