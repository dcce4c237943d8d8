"""``selfplay bench async``: what each mode costs in time and in staleness, with an engine and a trainer of set speed.

    depth1_vs_depth0              games per second with a double buffer against taking turns, when playing a batch and training
                                  on it take equally long: 2.0 would be perfect overlap
    MODE_s_per_step               seconds per step of each mode, on games of which one in eight is six times as long
    MODE_staleness                mean staleness of what was trained on (the maximum is in the reference)
    MODE_long_games               mean length trained on, as a share of the mean length of the same games in the mode
                                  ``synchronous``, which loses none; below 1 long games were lost

The engine is the policy server's own without a model: a request samples a fixed number of tokens a second, however many there
are. So the figures show who waits for whom, not how fast a machine is.
"""

from __future__ import annotations

import asyncio
import statistics
import tempfile
from pathlib import Path

import msgspec

from selfplay.bench.async_site import TOKENS, run_at_speed
from selfplay.bench.report import Row
from selfplay.config import load_config
from selfplay.controller.report import StepReport

GAME = str(Path(__file__).with_name("async_game.py"))
BATCH, TURNS = 8, 6
MODES: dict[str, tuple[str, ...]] = {
    "synchronous": ("buffer.depth=0",),
    "double_buffer": ("buffer.depth=1",),
    "bounded_4": ("buffer.depth=4",),
    "stream_4": ("buffer.depth=unbounded", "buffer.max_staleness=4"),
    "stream_1": ("buffer.depth=unbounded", "buffer.max_staleness=1"),
    "episode": ("buffer.depth=2", "sync.interrupt=episode"),
    "token": ("buffer.depth=2", "sync.interrupt=token"),
    "drain": ("buffer.depth=2", "sync.interrupt=drain"),
    "blocking": ("buffer.depth=2", "sync.interrupt=blocking"),
    "abort_resume": ("buffer.depth=2", "rollout.partial=abort_resume"),
    "cancel_group": ("buffer.depth=unbounded", "buffer.max_staleness=1", "rollout.partial=cancel_group"),
    "drain_games": ("buffer.depth=2", "rollout.partial=drain"),
}


class Size(msgspec.Struct, frozen=True, kw_only=True):
    """How much is measured."""

    steps: int
    pair_s: float
    """Seconds that playing a batch takes in the comparison of depths, and training on it likewise."""
    batch_s: float
    """The same for the modes, where one game in eight takes six times as long."""
    modes: tuple[str, ...]
    repeats: int


FULL = Size(steps=8, pair_s=0.8, batch_s=0.4, modes=tuple(MODES), repeats=2)
QUICK = Size(steps=4, pair_s=0.4, batch_s=0.3, modes=("synchronous", "token"), repeats=1)


def run(quick: bool = False) -> list[Row]:
    """The rows named above."""
    return asyncio.run(_measure(QUICK if quick else FULL))


async def _measure(size: Size) -> list[Row]:
    ratios, speeds = [], []
    for _ in range(size.repeats):
        playing_s = statistics.median(r.wait_s for r in (await _run(size, "synchronous", 0.0, size.pair_s))[1:])
        taking_turns = await _run(size, "synchronous", playing_s, size.pair_s)
        overlapped = await _run(size, "double_buffer", playing_s, size.pair_s)
        ratios.append(_s_per_step(taking_turns) / _s_per_step(overlapped))
        speeds.append(BATCH / _s_per_step(overlapped))
    rows = [
        Row(
            name="depth1_vs_depth0", value=statistics.median(speeds), unit="games/s", ratio=statistics.median(ratios),
            reference="buffer.depth=0, the same games and steps", repeats=size.repeats,
        )
    ]  # fmt: skip
    runs = {mode: await _run(size, mode, size.batch_s, size.batch_s, rare=8) for mode in size.modes}
    whole = runs["synchronous"]
    for mode, reports in runs.items():
        rows += _rows(mode, reports, whole)
    return rows


def _rows(mode: str, reports: list[StepReport], whole: list[StepReport]) -> list[Row]:
    last = reports[-1]
    lost = sum(last.accounting.dropped.values())
    length = last.length_trained["mean"] / whole[-1].length_trained["mean"]
    return [
        Row(
            name=f"{mode}_s_per_step", value=_s_per_step(reports), unit="s", ratio=_s_per_step(whole) / _s_per_step(reports),
            reference="synchronous", repeats=len(reports) - 1,
        ),
        Row(
            name=f"{mode}_staleness", value=statistics.fmean(r.staleness_mean for r in reports[1:]), unit="versions",
            reference=f"at most {max(r.staleness_max for r in reports)}",
        ),
        Row(name=f"{mode}_long_games", value=length, unit="share", reference=f"{lost} games dropped"),
    ]  # fmt: skip


async def _run(size: Size, mode: str, step_s: float, batch_s: float, *, rare: int = 0) -> list[StepReport]:
    """The reports of a run whose training step takes ``step_s`` and whose batch of short games ``batch_s``."""
    config = load_config(
        None,
        [
            f"env={GAME}", f"env_params.turns={TURNS}", f"env_params.rare={rare}", f"train.steps={size.steps}",
            f"train.batch={BATCH}", f"rollout.concurrency={BATCH}", "checkpoint.every=1000000", *MODES[mode],
        ],
    )  # fmt: skip
    with tempfile.TemporaryDirectory(prefix="bench-async-") as place:
        return await run_at_speed(config, Path(place), step_s=step_s, tokens_per_s=TURNS * TOKENS / batch_s)


def _s_per_step(reports: list[StepReport]) -> float:
    """From the first report to the last: the first batch has nothing to overlap with."""
    return (reports[-1].elapsed_s - reports[0].elapsed_s) / (len(reports) - 1)
