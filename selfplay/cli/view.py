"""How a run is shown to a person: a live view in a terminal, plain lines elsewhere, one JSON object with ``--json``."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from rich.columns import Columns
from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from selfplay.cli.output import console_for_lines
from selfplay.controller.report import AgentStep, RunSummary, Status, StepReport

REFRESH_PER_S = 4
MAX_EVENTS = 6
MOSTLY_LEGAL = 0.99
"""Legal mass from which NashConv of the legal answers alone is what is played; below, both are shown."""


class PlainView:
    """One line per event and per step, to standard error: for logs and for ``--json``."""

    def __init__(self) -> None:
        self._last_phase = ""

    def __enter__(self) -> PlainView:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def event(self, text: str) -> None:
        print(f"selfplay: {text}", file=sys.stderr, flush=True)

    def status(self, status: Status) -> None:
        pass

    def step(self, report: StepReport) -> None:
        print(step_line(report), file=sys.stderr, flush=True)


class LiveView:
    """A panel that is redrawn in place: where the run is, the last step, each agent, the last events."""

    def __init__(self, title: str, console: Console | None = None) -> None:
        self._title = title
        self._console = console or Console(stderr=True)
        self._status: Status | None = None
        self._report: StepReport | None = None
        self._events: list[str] = []
        self._evaluated = ""
        self._live = Live(self, console=self._console, refresh_per_second=REFRESH_PER_S, transient=False)

    def __enter__(self) -> LiveView:
        self._live.__enter__()
        return self

    def __exit__(self, *details: Any) -> None:
        self._live.__exit__(*details)

    def event(self, text: str) -> None:
        self._events = [*self._events, text][-MAX_EVENTS:]

    def status(self, status: Status) -> None:
        self._status = status

    def step(self, report: StepReport) -> None:
        self._report = report

    def __rich__(self) -> Panel:
        parts: list[Any] = []
        if self._status is not None:
            parts.append(_status_line(self._status, self._report))
        if self._report is not None:
            self._evaluated = evaluation_line(self._report) or self._evaluated
            parts.append(_figures(self._report))
            parts += [_agent(name, agent) for name, agent in self._report.agents.items()]
            parts += [Text(self._evaluated)] if self._evaluated else []
        parts += [Text(f"· {e}", style="dim", overflow="ellipsis", no_wrap=True) for e in self._events]
        return Panel(Group(*parts), title=self._title, border_style="cyan")


def step_line(report: StepReport) -> str:
    """One step on one line."""
    agents = "  ".join(
        f"{name}@{a.version} " + (f"kl {a.train.kl:.4f} probe {a.probe_mean:.4f}" if a.train else "no signal")
        for name, a in report.agents.items()
    )
    wins = " ".join(_endings(report))
    return (
        f"step {report.step}/{report.num_steps}  {report.episodes_per_s:.2f} episodes/s  "
        f"{report.sampled_tokens_per_s:.0f} tok/s sampled  {report.trained_tokens_per_s:.0f} tok/s trained  "
        f"buffer {report.buffer_episodes}  stale {report.staleness_mean:.1f}  length {_lengths(report)}  wins {wins}  "
        f"illegal {report.illegal_share:.0%}  {_remote(report, '  ')}{evaluation_line(report)}{agents}  ETA {clock(report.eta_s)}"
    )


def _remote(report: StepReport, end: str = "") -> str:
    """What remote pools bring, where there are any."""
    p = report.pools
    if not (p.get("remote_pools") or p.get("remote_games")):
        return ""
    share, per_s = p["remote_share"], p["remote_episodes_per_s"]
    return f"remote {p['remote_pools']:.0f} with {share:.0%} of games, {per_s:.2f} episodes/s{end}"


def _lengths(report: StepReport) -> str:
    """Mean sampled tokens of the games trained on, and of all that were played."""
    trained, played = (d.get("mean", 0.0) for d in (report.length_trained, report.length_generated))
    return f"{trained:.0f} of {played:.0f}"


def evaluation_line(report: StepReport) -> str:
    """What the step's evaluation found, where it had one: exact figures, and points against each anchor with their interval."""
    e, out = report.evaluation, ""
    if "nash_conv" in e:
        played = f", {e['nash_conv_as_played']:.3f} as played" if e["legal_mass"] < MOSTLY_LEGAL else ""
        out += f"NashConv {e['nash_conv']:.3f}{played} (average {e['average_nash_conv']:.3f}, legal {e['legal_mass']:.3f})  "
    for anchor in [name.removesuffix("/points") for name in e if name.endswith("/points")]:
        low, high = e[f"{anchor}/low"], e[f"{anchor}/high"]
        out += f"against {anchor} {e[f'{anchor}/points']:.0%} of points ({low:.0%} to {high:.0%})  "
    return out


def _status_line(status: Status, report: StepReport | None) -> Table:
    grid = Table.grid(padding=(0, 2))
    eta = clock(report.eta_s) if report is not None else "-"
    bar = progress_bar(status.step, status.num_steps)
    grid.add_row(
        f"[bold]step {status.step}/{status.num_steps}[/] {bar}", f"[cyan]{status.phase}[/]",
        f"{clock(status.elapsed_s)} gone, ETA {eta}",
    )  # fmt: skip
    grid.add_row(
        f"episodes {status.stored} stored, {status.in_flight} in flight", f"buffer {status.buffer_episodes}",
        " ".join(f"{a}@{v}" for a, v in status.versions.items()),
    )  # fmt: skip
    return grid


def _endings(report: StepReport) -> list[str]:
    """Who won how much of the batch; and how much of it was cut short, where any was."""
    cut = report.ended.get("truncated", 0.0)
    return [f"{s} {w:.0%}" for s, w in (report.win_share | ({"cut short": cut} if cut else {})).items()]


def _figures(report: StepReport) -> Columns:
    return _pairs(
        {
            "episodes/s": f"{report.episodes_per_s:.2f}",
            "sampled": f"{report.sampled_tokens_per_s:.0f} tok/s",
            "trained": f"{report.trained_tokens_per_s:.0f} tok/s",
            "staleness": f"{report.staleness_mean:.1f} (max {report.staleness_max})",
            "turns": f"{report.turns_mean:.1f}",
            "tokens": f"{report.sampled_tokens_mean:.0f}",
            "trained of played": _lengths(report),
            "illegal": f"{report.illegal_share:.0%}",
            "wins": "  ".join(_endings(report)),
        }
        | ({"pools": remote} if (remote := _remote(report)) else {})
    )


def _agent(name: str, agent: AgentStep) -> Columns:
    """Version, loss, KL, gradient and probe figures of one agent."""
    t = agent.train
    if t is None:
        return _pairs({f"{name}@{agent.version}": "no signal in this step"})
    return _pairs(
        {
            f"{name}@{agent.version}": "",
            "loss": f"{t.loss:+.4f}",
            "KL": f"{t.kl:.4f}",
            "grad norm": f"{t.grad_norm:.3f}",
            "entropy": f"{t.entropy:.2f}",
            "probe |Δlogp|": f"{agent.probe_mean:.4f} (max {agent.probe_max:.3f})",
            "moved |Δlogp|": f"{agent.policy_moved:.4f}",
            "sync": f"{agent.sync_s * 1e3:.0f} ms",
        }
    )


def _pairs(values: Mapping[str, str]) -> Columns:
    """Names and values side by side, as many to a line as the terminal is wide."""
    return Columns([Text.assemble((name, "dim"), " ", value) for name, value in values.items()], padding=(0, 2))


def progress_bar(done: int, total: int, width: int = 20) -> str:
    """A text bar; full when there is nothing to do."""
    filled = width if total == 0 else min(width, done * width // total)
    return "[green]" + "━" * filled + "[/][dim]" + "━" * (width - filled) + "[/]"


def clock(seconds: float) -> str:
    """``1:02:03`` or ``02:03``."""
    whole = max(0, int(seconds))
    hours, rest = divmod(whole, 3600)
    return f"{hours}:{rest // 60:02}:{rest % 60:02}" if hours else f"{rest // 60:02}:{rest % 60:02}"


def open_view(title: str, *, json: bool) -> PlainView | LiveView:
    """The live view on a terminal, plain lines otherwise."""
    return PlainView() if json or not sys.stderr.isatty() else LiveView(title)


def print_summary(summary: RunSummary, console: Console | None = None) -> None:
    """The short table at the end: what was played, what moved, where it is."""
    console = console or console_for_lines()
    table = Table(title=f"run {summary.outcome}", title_justify="left", show_header=False, box=None, padding=(0, 2))
    table.add_row("played", summary.accounting.equation())
    table.add_row(
        "trained", f"{summary.step} steps in {clock(summary.elapsed_s)} ({summary.engine}, {summary.transport})"
    )
    last = summary.last
    if last is not None:
        table.add_row("won", ", ".join(_endings(last)) + "  (last batch)")
    for agent, (first, now) in summary.versions.items():
        table.add_row(f"moved {agent}", _moved(agent, first, now, last))
        table.add_row("", summary.adapters[agent])
    table.add_row("run folder", summary.run)
    if summary.outcome == "interrupted":
        table.add_row("continue with", f"selfplay resume {summary.run}")
    console.print(table, soft_wrap=True)


def _moved(agent: str, first: int, now: int, last: StepReport | None) -> str:
    text = f"@{first} → @{now}"
    step = last.agents.get(agent) if last is not None else None
    if step is not None and step.train is not None:
        text += f"   probe mean |Δlogp| {step.probe_mean:.4f}, moved {step.policy_moved:.4f} in the last step"
    return text
