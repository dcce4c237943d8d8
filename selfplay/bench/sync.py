"""``selfplay bench sync``: what publishing a new adapter costs, on the real vLLM engine.

    throughput_while_publishing   the same generation with two publications a second, against none
    engine_blocked_ms             how long the engine's own loop is held up until a new version is usable, per 10 MB of adapter
                                  (smaller ones as they are)
    lost_ms_per_publication       generation time lost per publication, whatever the cause
    memory_vs_file                a training step of four agents: from its end to the first token of every new version, in memory
                                  against by disk, an adapter of 10 MB each
    usable_memory_vs_file         the same, until requests may name every new version: the whole of a sync
    one_…                         both, for one agent
    large_…                       both, for one agent whose adapter has eight times the size
    first_token_alone             the token of ``one_memory_vs_file`` from a version that is long there: what no route can go
                                  below, and with ``ratio``, how far that row could rise at most on this machine
    first_use_ms                  what filling the slot of a new version adds to its first token, per 10 MB of adapter
    publish_ROUTE_p50, _p99       one agent: tensors → first token by each transport and by disk, engine idle
    usable_ROUTE_p50, _p99        one agent: tensors → requests may name the new version
    pause_ROUTE_p50, _p99         of that, how long the engine's own loop stood still

The load samples a fixed number of tokens from the base and two other adapters, so both runs do the same work. By disk
means save, fsync and rename, then vLLM's own loader.
"""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
import statistics
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import get_args

import msgspec

from selfplay.bench.report import Row
from selfplay.bench.sync_site import STEP_AGENTS, Published, Route, Site
from selfplay.models import resolve_model
from selfplay.models.cache import cache_folder
from selfplay.process import RuntimeDir

MODEL, QUICK_MODEL = "smollm2-135m", "tiny"
PUBLISH_EVERY_S = 0.5
REFERENCE_BYTES = 10e6


class Size(msgspec.Struct, frozen=True, kw_only=True):
    """How much is measured."""

    model: str
    publications: int
    """Of each route, engine idle."""
    requests: int
    """Replies in one run of the load."""
    pairs: int
    """Runs with and without publications."""


FULL = Size(model=MODEL, publications=20, requests=96, pairs=3)
QUICK = Size(model=QUICK_MODEL, publications=3, requests=48, pairs=1)


def run(quick: bool) -> list[Row]:
    """The rows named above; ``quick`` uses the tiny model and few repeats."""
    size = QUICK if quick else FULL
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as apart:  # a process has one site
        large = apart.submit(_measure_large, size).result()
    return [*asyncio.run(_measure(size)), *large]


async def _measure(size: Size) -> list[Row]:
    async with _site(size) as site:
        await site.generate_all(size.requests // 2)
        loaded, times = await _under_load(site, size), await _idle(site, size)
        step = await _step(site, size)
        what, one = f" ({STEP_AGENTS} agents, {_megabytes(site)} each)", f" (one agent, {_megabytes(site)})"
        compared = [*_against_disk(step, "", what), *_against_disk(times, "one_", one)]
        return [*loaded, *compared, _first_token_alone(times), _first_use(times, site.num_bytes), *_by_route(times)]


def _measure_large(size: Size) -> list[Row]:
    async def measure() -> list[Row]:
        async with _site(size, large=True) as site:
            return _against_disk(await _idle(site, size), "large_", f" (one agent, {_megabytes(site)})")

    return asyncio.run(measure())


@contextlib.asynccontextmanager
async def _site(size: Size, *, large: bool = False) -> AsyncIterator[Site]:
    model, runtime = resolve_model(size.model), RuntimeDir.create()
    try:
        with tempfile.TemporaryDirectory(prefix="bench-sync-", dir=cache_folder()) as disk:
            async with Site.open(model, runtime.path, Path(disk), large=large) as site:
                yield site
    finally:
        runtime.remove()


async def _under_load(site: Site, size: Size) -> list[Row]:
    """Runs of the same work in turn, so that a slow minute of the machine falls on both."""
    ratios, lost_ms, speeds = [], [], []
    site.blocked_ms.clear()
    for i in range(size.pairs):
        runs: dict[bool, tuple[float, int]] = {}
        for publishing in (False, True) if i % 2 == 0 else (True, False):
            runs[publishing] = await _timed_load(site, size.requests, publishing)
        (quiet_s, _), (busy_s, count) = runs[False], runs[True]
        ratios.append(quiet_s / busy_s)
        lost_ms.append((busy_s - quiet_s) * 1e3 / max(1, count))
        speeds.append(size.requests / busy_s)
    blocked = [_per_reference(ms, site.num_bytes) for ms in site.blocked_ms]
    return [
        Row(
            name="throughput_while_publishing", value=statistics.median(speeds), unit="replies/s",
            ratio=statistics.median(ratios), reference="the same load without publications", repeats=size.pairs,
        ),
        Row(
            name="engine_blocked_ms", value=statistics.median(blocked), unit="ms/10 MB",
            reference="time in which the engine's loop registers an adapter", repeats=len(blocked),
        ),
        Row(
            name="lost_ms_per_publication", value=statistics.median(lost_ms), unit="ms",
            reference="longer duration of the load, per publication", repeats=size.pairs,
        ),
    ]  # fmt: skip


async def _timed_load(site: Site, requests: int, publishing: bool) -> tuple[float, int]:
    """(seconds of the load, publications during it)."""
    if not publishing:
        return await site.generate_all(requests), 0
    done = asyncio.Event()
    publisher = asyncio.create_task(_publish_until(site, done))
    try:
        elapsed_s = await site.generate_all(requests)
    finally:
        done.set()
    return elapsed_s, await publisher


async def _publish_until(site: Site, done: asyncio.Event) -> int:
    count = 0
    while not done.is_set():
        start = time.perf_counter()
        await site.publish("gloo")
        count += 1
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(done.wait(), max(0.0, PUBLISH_EVERY_S - (time.perf_counter() - start)))
    return count


class Idle(msgspec.Struct, frozen=True, kw_only=True):
    """Times of an idle engine, by route."""

    taken: dict[str, list[Published]]
    alone_ms: list[float]
    """The same first token from a version that is long there."""


async def _idle(site: Site, size: Size) -> Idle:
    """Every route in turn, engine idle."""
    routes: dict[str, Callable[[], Awaitable[Published]]] = {r: _publisher(site, r) for r in get_args(Route)}
    routes["disk"] = site.publish_by_disk
    found = Idle(taken={name: [] for name in routes}, alone_ms=[])
    for number in range(size.publications + 1):
        alone_ms = await site.first_token_ms()
        for name, publish in routes.items():
            took = await publish()
            if number:  # the first of each is a warm-up
                found.taken[name].append(took)
        if number:
            found.alone_ms.append(alone_ms)
    return found


async def _step(site: Site, size: Size) -> Idle:
    """A step of several agents, by the usual transport and by disk in turn, engine idle."""
    found = Idle(taken={"gloo": [], "disk": []}, alone_ms=[])
    for number in range(size.publications // 2 + 1):
        memory, disk = await site.publish("gloo", STEP_AGENTS), await site.publish_by_disk(STEP_AGENTS)
        if number:  # the first is a warm-up
            found.taken["gloo"].append(memory)
            found.taken["disk"].append(disk)
    return found


def _against_disk(times: Idle, prefix: str, what: str) -> list[Row]:
    return [
        _ratio(f"{prefix}memory_vs_file", _times(times, "first_token_ms"), what),
        _ratio(f"{prefix}usable_memory_vs_file", _times(times, "usable_ms"), what),
    ]


def _megabytes(site: Site) -> str:
    return f"{site.num_bytes / 1e6:.1f} MB"


def _per_reference(ms: float, num_bytes: int) -> float:
    return ms * REFERENCE_BYTES / max(num_bytes, REFERENCE_BYTES)


def _ratio(name: str, by_route: dict[str, list[float]], what: str) -> Row:
    memory, disk = statistics.median(by_route["gloo"]), statistics.median(by_route["disk"])
    return Row(
        name=name, value=memory, unit="ms", ratio=disk / memory, repeats=len(by_route["gloo"]),
        reference=f"save, fsync, vLLM's disk loader{what}",
    )  # fmt: skip


def _first_token_alone(times: Idle) -> Row:
    bound = statistics.median(times.alone_ms)
    return Row(
        name="first_token_alone", value=bound, unit="ms", repeats=len(times.alone_ms),
        ratio=statistics.median(_times(times, "first_token_ms")["disk"]) / bound, reference="save, fsync, vLLM's disk loader",
    )  # fmt: skip


def _first_use(times: Idle, num_bytes: int) -> Row:
    first = [t.first_token_ms - t.usable_ms for route, took in times.taken.items() if route != "disk" for t in took]
    return Row(
        name="first_use_ms", value=_per_reference(statistics.median(first) - statistics.median(times.alone_ms), num_bytes),
        unit="ms/10 MB", reference="the same token from a version that is long there", repeats=len(first),
    )  # fmt: skip


def _by_route(times: Idle) -> list[Row]:
    rows = []
    for what, kind in (("publish", "first_token_ms"), ("usable", "usable_ms"), ("pause", "pause_ms")):
        for name, found in _times(times, kind).items():
            p50, p99 = percentiles(found)
            rows.append(Row(name=f"{what}_{name}_p50", value=p50, unit="ms", repeats=len(found)))
            rows.append(Row(name=f"{what}_{name}_p99", value=p99, unit="ms", repeats=len(found)))
    return rows


def _times(times: Idle, kind: str) -> dict[str, list[float]]:
    return {name: [getattr(t, kind) for t in took] for name, took in times.taken.items()}


def _publisher(site: Site, route: Route) -> Callable[[], Awaitable[Published]]:
    return lambda: site.publish(route)


def percentiles(values: Sequence[float]) -> tuple[float, float]:
    """(median, 99th percentile); the largest value where there are fewer than a hundred."""
    ordered = sorted(values)
    return statistics.median(ordered), ordered[min(len(ordered) - 1, int(len(ordered) * 0.99))]
