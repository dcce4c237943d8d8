"""``selfplay runs``: which runs there are, what became of one, and its episodes as JSON lines.

In: a runs folder, or a run by name or path. Out: a short table, or JSON on standard output and nothing else there. Only
reads; works on a run that is going on, and on one whose controller was killed. Text that models or environments wrote is
shown with hidden characters escaped.
"""

from __future__ import annotations

import contextlib
import datetime
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import click
import msgspec

from selfplay.cli.output import console_for_lines
from selfplay.errors import StoreError, UserError, suggestion
from selfplay.league.pool import SnapshotPool, league_facts
from selfplay.store.atomic import store_errors
from selfplay.store.checkpoints import Checkpoints
from selfplay.store.episode_log import EpisodeLog
from selfplay.store.metrics import Row, read_metrics
from selfplay.store.parquet import EPISODE_COLUMNS, episode_row, write_parquet
from selfplay.store.run_folder import RunFolder, list_runs
from selfplay.store.text import json_line
from selfplay.wire.text import safe_text

ACCOUNTING = "accounting/"
"""Metrics named so are the ledger of the run."""

runs_dir_option = click.option("--runs-dir", default="runs", show_default=True, help="Where run folders are.")
json_option = click.option("--json", "as_json", is_flag=True, help="JSON on standard output, and nothing else there.")


@click.group()
def command() -> None:
    """List and inspect runs."""


@command.command("list")
@runs_dir_option
@json_option
def list_(runs_dir: str, as_json: bool) -> None:
    """Show every run, oldest first."""
    rows = [_summary(run, _warn) for run in list_runs(runs_dir, _warn)]
    if as_json:
        click.echo(json_line({"runs": rows}))
    elif not rows:
        click.echo(f"no runs in {safe_text(runs_dir)}; start one with  selfplay train --env debate-v0")
    else:
        _print_table(["run", "status", "environment", "model", "step", "created"], rows)


@command.command()
@click.argument("run")
@runs_dir_option
@json_option
def show(run: str, runs_dir: str, as_json: bool) -> None:
    """Show one run: status, versions, accounting, last metrics, paths. RUN is a name or a path."""
    facts = _facts(_find(run, runs_dir), _warn)
    click.echo(json_line(facts) if as_json else _describe(facts))


@command.command()
@click.argument("run")
@runs_dir_option
@click.option(
    "--format",
    "form",
    type=click.Choice(["jsonl", "parquet"]),
    default="jsonl",
    show_default=True,
    help="One episode a line, or a row.",
)
@click.option(
    "--out", type=click.Path(dir_okay=False, path_type=Path), help="Write to this file instead of standard output."
)
@click.option("--from", "first", type=click.IntRange(min=0), default=0, show_default=True, help="First episode number.")
def export(run: str, runs_dir: str, form: str, out: Path | None, first: int) -> None:
    """Write a run's episodes, in the order they were stored."""
    folder = _find(run, runs_dir)
    if form == "parquet":
        if out is None:
            raise UserError("Parquet is no text: name a file with --out")
        with EpisodeLog.open(folder.episodes, write=False, say=_warn) as log:
            found = log.episodes(min(first, log.next_seq))
            write_parquet(out, EPISODE_COLUMNS, (episode_row(seq, episode) for seq, episode in found))
        return
    with _line_writer(out) as write, EpisodeLog.open(folder.episodes, write=False, say=_warn) as log:
        for seq, episode in log.episodes(min(first, log.next_seq)):
            write(json_line({"seq": seq, "episode": episode}))


@command.command()
@click.argument("one")
@click.argument("two")
@runs_dir_option
@click.option(
    "--from", "first", type=click.IntRange(min=0), default=0, show_default=True, help="First step to compare."
)
@json_option
def compare(one: str, two: str, runs_dir: str, first: int, as_json: bool) -> None:
    """Compare run ONE with run TWO, paired by step: what differs, by how much, how sure."""
    from selfplay.cli.runs_compare import compare as differences
    from selfplay.cli.runs_compare import text
    from selfplay.config import changed_keys

    a, b = _find(one, runs_dir), _find(two, runs_dir)
    settings = [k for k in changed_keys(a.config(), b.config()) if k != "name"]
    found = differences(read_metrics(a.metrics_path), read_metrics(b.metrics_path), first=first)
    if as_json:
        click.echo(msgspec.json.encode({"one": a.name, "two": b.name, "settings": settings, "figures": found}).decode())
    else:
        click.echo(safe_text(text({"one": a.name, "two": b.name}, settings, found), keep="\n"))


# ── finding and reading ──────────────────────────────────────────────────────────────────────────


def _find(run: str, runs_dir: str) -> RunFolder:
    """The run of that path, or of that name in ``runs_dir``; raises `UserError` with the nearest names."""
    for path in (Path(runs_dir).expanduser() / run, Path(run).expanduser()):
        with contextlib.suppress(ValueError, OSError):  # a name with NUL, or too long to be a path, is no run
            if (path / "manifest.json").is_file():
                return RunFolder.open(path)
    names = [r.name for r in list_runs(runs_dir, _warn)]
    raise UserError(f"there is no run {safe_text(run[:80])!r} in {runs_dir}{suggestion(run, names)}")


def _summary(run: RunFolder, warn: Callable[[str], None]) -> Row:
    manifest = run.manifest()
    status, reason = run.status()
    last = _last_metrics(run, warn)
    return {
        "run": run.name, "path": str(run.path), "status": status, "reason": reason, "environment": manifest.env,
        "model": manifest.model, "step": last.get("step", 0), "created": manifest.created,
    }  # fmt: skip


def _facts(run: RunFolder, warn: Callable[[str], None]) -> Row:
    last = _last_metrics(run, warn)
    checkpoint = Checkpoints(run.checkpoints, keep=1, say=warn).latest()
    versions = checkpoint.state.versions if checkpoint is not None else {}
    with EpisodeLog.open(run.episodes, write=False, say=warn) as log:
        stored, num_bytes = log.next_seq, log.num_bytes
    return _summary(run, warn) | {
        "seed": run.manifest().seed, "resumes": run.manifest().resumes, "engine": run.manifest().engine,
        "checkpoint_step": checkpoint.step if checkpoint is not None else None,
        "versions": versions | _versions(last), "accounting": _under(last, ACCOUNTING), "episodes_on_disk": stored,
        "episode_bytes": num_bytes, "metrics": {k: v for k, v in last.items() if not k.startswith(ACCOUNTING)},
        "league": _league(run, warn), "libraries": run.manifest().libraries, "hardware": run.manifest().hardware,
        "paths": {
            "config": str(run.config_path), "metrics": str(run.metrics_path), "adapters": str(run.adapters),
            "episodes": str(run.episodes), "checkpoints": str(run.checkpoints), "league": str(run.league_path), "logs": str(run.logs),
        },
    }  # fmt: skip


def _league(run: RunFolder, warn: Callable[[str], None]) -> Row:
    """Snapshots and where they stand, good versions, and who was met how often beside how often the rules would have it."""
    if not run.league_path.is_file():
        return {}
    try:
        with contextlib.closing(SnapshotPool(run.league_path, write=False)) as pool:
            return league_facts(pool)
    except StoreError as e:
        warn(str(e))
        return {}


def _last_metrics(run: RunFolder, warn: Callable[[str], None]) -> Row:
    try:
        rows = read_metrics(run.metrics_path)
    except StoreError as e:
        warn(str(e))
        return {}
    return rows[-1] if rows else {}


def _versions(last: Row) -> dict[str, int]:
    """Agent → version, from the metrics named ``agents/NAME/version``."""
    parts = {tuple(key.split("/")): value for key, value in last.items()}
    return {p[1]: value for p, value in parts.items() if len(p) == 3 and p[0] == "agents" and p[2] == "version"}


def _under(last: Row, prefix: str) -> Row:
    """The metrics whose name begins with ``prefix``, without it."""
    return {k.removeprefix(prefix): v for k, v in last.items() if k.startswith(prefix)}


# ── showing ──────────────────────────────────────────────────────────────────────────────────────


def _print_table(columns: list[str], rows: list[Row]) -> None:
    from rich.table import Table  # not at the top: --help needs no table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in columns:
        # A row is a line, whatever the terminal's width: names are there to be copied, lines to be searched.
        table.add_column(column, no_wrap=True, overflow="ignore", justify="right" if column == "step" else "left")
    for row in rows:
        table.add_row(*(Text(safe_text(_shown(row[column], column))) for column in columns))
    console_for_lines(always=True).print(table)


def _describe(facts: Row) -> str:
    head = f"{facts['run']}: {facts['status']}" + (f" ({facts['reason']})" if facts["reason"] else "")
    lines = [safe_text(head)]
    lines += _pairs(
        {
            k: facts[k]
            for k in ("environment", "model", "engine", "seed", "step", "checkpoint_step", "resumes", "created")
        }
    )
    for title in ("versions", "league", "accounting", "metrics", "hardware", "libraries", "paths"):
        lines += [f"\n{title}", *(_pairs(facts[title]) or ["  none yet"])]
    return "\n".join(lines)


def _pairs(values: Mapping[str, Any]) -> list[str]:
    width = max(map(len, values), default=0)
    return [
        f"  {safe_text(k):<{width}}  {safe_text(_shown(v, k))}" for k, v in values.items() if v is not None and v != ""
    ]


def _shown(value: Any, name: str) -> str:
    """A value for people: moments as date and time of this machine, numbers with six digits."""
    if name == "created":
        return _moment(datetime.datetime.fromisoformat(value))
    if name == "time":
        return _moment(datetime.datetime.fromtimestamp(value, datetime.UTC))
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def _moment(when: datetime.datetime) -> str:
    return f"{when.astimezone():%Y-%m-%d %H:%M:%S}"


@contextlib.contextmanager
def _line_writer(path: Path | None) -> Iterator[Callable[[str], None]]:
    """Writes lines to standard output, or to ``path``; UTF-8, whatever the terminal's encoding is."""
    if path is None:
        yield lambda line: click.echo(line.encode())
        return
    with store_errors(path), path.open("w", encoding="utf-8", newline="\n") as f:
        yield lambda line: print(line, file=f)


def _warn(message: str) -> None:
    print(f"selfplay: {safe_text(message)}", file=sys.stderr)
