"""The live view: what it shows, and that no figure is cut however narrow the terminal is."""

from __future__ import annotations

import io

import msgspec
import pytest
from rich.console import Console

from selfplay.buffer.accounting import Accounting
from selfplay.cli.view import LiveView, clock, print_summary, step_line
from selfplay.controller.report import AgentStep, RunSummary, StepReport
from selfplay.wire.messages import AgentReport

NUMBERS = {"staleness_max": 2, "step": 6, "num_steps": 30, "episodes": 8, "games_cancelled": 0, "buffer_episodes": 3}
TABLES = {
    "win_share": {"pro": 0.25, "con": 0.5, "draw": 0.25}, "ended": {}, "reward_mean": {}, "scorers": {},
    "length_generated": {"mean": 31.0}, "length_trained": {"mean": 32.0},
}  # fmt: skip


def sample(kind: type[msgspec.Struct], **given: object) -> dict[str, object]:
    """A value for every field of ``kind`` that has no default."""
    return {f.name: given.get(f.name, 1.25) for f in msgspec.structs.fields(kind) if f.required or f.name in given}


def report() -> StepReport:
    counts = Accounting(started=9, stored=8, in_flight=1, failed={}, void={}, dropped={}, trained=8, waiting=0)
    train = AgentReport(**sample(AgentReport, grad_norm=0.125, kl=0.0625, num_actions=7, num_segments=3, moved=True))  # type: ignore[arg-type]
    agents = {
        "pro": AgentStep(version=6, moved=True, train=train, sync_s=0.12),
        "con": AgentStep(version=4, moved=False),
    }
    return StepReport(**sample(StepReport, **NUMBERS, **TABLES, buffer_bytes=1, accounting=counts, agents=agents))  # type: ignore[arg-type]


@pytest.mark.parametrize("width", [60, 80, 120, 200])
def test_no_figure_is_cut_at_any_width(width: int) -> None:
    console = Console(file=io.StringIO(), width=width, height=60)
    view = LiveView("a run", console)
    view.step(report())
    console.print(view)
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert "…" not in text
    assert all(len(line) <= width for line in text.splitlines())
    for part in (
        "staleness 1.2 (max 2)",
        "trained of played 32 of 31",
        "pro@6",
        "grad norm 0.125",
        "KL 0.0625",
        "sync 120 ms",
        "con@4 no signal in this step",
        "con 50%",
    ):
        assert part in text


def test_a_step_is_one_line_elsewhere() -> None:
    line = step_line(report())
    assert "\n" not in line
    assert "step 6/30" in line
    assert "con@4 no signal" in line
    assert "wins pro 25% con 50% draw 25%  illegal" in line
    cut = step_line(msgspec.structs.replace(report(), ended={"natural": 0.0, "truncated": 1.0}))
    assert "draw 25% cut short 100%  illegal" in cut


def test_remote_pools_are_told_where_there_are_any() -> None:
    figures = {"remote_pools": 2, "remote_games": 3, "remote_share": 0.375, "remote_episodes_per_s": 1.5}
    shown = "remote 2 with 38% of games, 1.50 episodes/s"
    with_pools, without = (msgspec.structs.replace(report(), pools=p) for p in (figures, {"workers": 1}))
    assert shown in step_line(with_pools)
    assert "remote" not in step_line(without)
    console = Console(file=io.StringIO(), width=120, height=60)
    view = LiveView("a run", console)
    view.step(with_pools)
    console.print(view)
    assert shown in console.file.getvalue()  # type: ignore[attr-defined]


@pytest.mark.parametrize(("seconds", "shown"), [(0, "00:00"), (61.9, "01:01"), (3723, "1:02:03"), (-5, "00:00")])
def test_clock(seconds: float, shown: str) -> None:
    assert clock(seconds) == shown


@pytest.mark.parametrize(("outcome", "told"), [("finished", False), ("interrupted", True)])
def test_a_run_that_was_interrupted_says_how_it_goes_on(outcome: str, told: bool) -> None:
    counts = Accounting(started=0, stored=0, in_flight=0, failed={}, void={}, dropped={}, trained=0, waiting=0)
    summary = RunSummary(
        run="runs/r", outcome=outcome, step=0, elapsed_s=1.0, engine="vllm", transport="shm", accounting=counts,
        versions={}, last=None, adapters={},
    )  # fmt: skip
    out = io.StringIO()
    print_summary(summary, Console(file=out, width=80))
    assert ("selfplay resume runs/r" in out.getvalue()) is told
