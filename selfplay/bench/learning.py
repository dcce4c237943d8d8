"""Whole training runs as benchmarks: what ``selfplay bench learn-kuhn`` and ``learn-chat`` share.

In: a config and a seed. Out: the exact evaluations that the run made of itself, in order, with what they had cost so far.
Runs are real ones: environment workers, policy server, trainer, weight sync, checkpoints; only the run folder is temporary.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
from collections.abc import Sequence

import msgspec

from selfplay.bench.report import Row
from selfplay.config import Config, load_config
from selfplay.controller.report import Status, StepReport
from selfplay.errors import RunError
from selfplay.launch.commands import start_run

LAST = 5
"""Evaluations whose median stands for the last iterate."""


class Evaluation(msgspec.Struct, frozen=True, kw_only=True):
    """One exact evaluation of a run."""

    step: int
    games: int
    elapsed_s: float
    """Since the run began to play; the warm start and the start of the engines come on top."""
    figures: dict[str, float]
    illegal_share: float
    """Of the turns in the batch of this step."""


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """Where a run stood after so many games."""

    average: float
    last: float
    """Median of the last `LAST` evaluations of the current versions."""
    legal: float
    """The least legal mass of these evaluations."""
    games: int
    elapsed_s: float


def train(settings: Sequence[str], seed: int) -> list[Evaluation]:
    """One run from its start to its last step."""
    with tempfile.TemporaryDirectory(prefix="selfplay-learn-") as place:
        config = load_config(None, [*settings, f"seed={seed}", f"runs_dir={place}", f"name=seed-{seed}"])
        observer = _Observer(config, f"seed {seed}")
        summary = start_run(config, observer)
    if summary.outcome != "finished":
        raise RunError(f"the run of seed {seed} was {summary.outcome}")
    return observer.evaluations


def outcome(evaluations: Sequence[Evaluation], games: float) -> Outcome:
    """Where the run stood at its last evaluation within ``games`` games."""
    within = [e for e in evaluations if e.games <= games]
    if not within:
        raise RunError(f"no evaluation within {games:.0f} games: lower eval.every or train.batch")
    last = within[-LAST:]
    return Outcome(
        average=last[-1].figures["average_nash_conv"], last=statistics.median(e.figures["nash_conv"] for e in last),
        legal=min(e.figures["legal_mass"] for e in last), games=last[-1].games, elapsed_s=last[-1].elapsed_s,
    )  # fmt: skip


def row(name: str, values: Sequence[float], unit: str, seeds: Sequence[int], what: str, *, best: bool = False) -> Row:
    """The worst seed's value; mean and all values beside it."""
    worst = min(values) if best else max(values)
    each = ", ".join(f"{v:.3f}" for v in values)
    told = f"worst of seeds {', '.join(map(str, seeds))}; mean {statistics.fmean(values):.3f}, each {each}; {what}"
    return Row(name=name, value=worst, unit=unit, reference=told, repeats=len(values))


class _Observer:
    """Keeps evaluations and tells of them."""

    def __init__(self, config: Config, title: str) -> None:
        self._batch, self._title = config.train.batch, title
        self.evaluations: list[Evaluation] = []

    def event(self, text: str) -> None:
        """A line of a run that nobody watches in detail: only trouble matters, and that ends the run."""

    def status(self, status: Status) -> None:
        """Nobody looks."""

    def step(self, report: StepReport) -> None:
        if not report.evaluation:
            return
        found = Evaluation(
            step=report.step, games=report.step * self._batch, elapsed_s=report.elapsed_s,
            figures=dict(report.evaluation), illegal_share=report.illegal_share,
        )  # fmt: skip
        self.evaluations.append(found)
        f = found.figures
        print(
            f"{self._title}: step {found.step}, {found.games} games, {found.elapsed_s:.0f} s, NashConv {f['nash_conv']:.3f}, "
            f"average {f['average_nash_conv']:.3f}, legal {f['legal_mass']:.4f}",
            file=sys.stderr, flush=True,
        )  # fmt: skip
