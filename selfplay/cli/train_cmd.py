"""``selfplay train`` and ``selfplay resume``."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

import click
import msgspec

from selfplay.config import describe_config, load_config

if TYPE_CHECKING:
    from selfplay.controller.report import Observer, RunSummary

EXIT_INTERRUPTED = 130


@click.command(no_args_is_help=False)
@click.argument("items", nargs=-1, metavar="[CONFIG.toml] [key=value ...]")
@click.option("--env", "env_id", help="Environment id, for example debate-v0.")
@click.option("--print-config", is_flag=True, help="Show every effective value and stop.")
@click.option("--json", "as_json", is_flag=True, help="Progress on stderr, one JSON object on stdout.")
def command(items: tuple[str, ...], env_id: str | None, print_config: bool, as_json: bool) -> None:
    """Train the agents of an environment against each other.

    \b
    selfplay train --env debate-v0
    selfplay train --env kuhn-poker-v0 model=tiny train.steps=5
    selfplay train configs/debate.toml seed=1 agents.pro.lr=1e-4

    Ctrl-C once finishes the step, saves and leaves; twice leaves at once. Continue with: selfplay resume RUN
    """
    files = [i for i in items if "=" not in i]
    if len(files) > 1:
        raise click.UsageError(f"one config file at most, got {', '.join(files)}")
    overrides = [i for i in items if "=" in i]
    if env_id is not None:
        overrides.append(f"env={env_id}")
    config = load_config(files[0] if files else None, overrides)
    if print_config:
        click.echo(describe_config(config))
        return
    _show(lambda observer: _commands().start_run(config, observer), f"selfplay train {config.env}", as_json)


@click.command()
@click.argument("run", type=click.Path(path_type=Path))
@click.argument("overrides", nargs=-1, metavar="[key=value ...]")
@click.option("--json", "as_json", is_flag=True, help="Progress on stderr, one JSON object on stdout.")
def resume(run: Path, overrides: tuple[str, ...], as_json: bool) -> None:
    """Continue a run where its last checkpoint left it; nothing acknowledged is lost.

    \b
    selfplay resume runs/debate-v0-20260101-120000
    selfplay resume runs/my-run train.steps=50
    """
    _show(lambda observer: _commands().resume_run(run, overrides, observer), f"selfplay resume {run}", as_json)


def _commands() -> ModuleType:
    """Imported late: `--help` must not wait for it."""
    return import_module("selfplay.launch.commands")


def _show(work: Callable[[Observer], RunSummary], title: str, as_json: bool) -> None:
    """Run ``work`` under a view, then say what came of it; an interrupted run exits with 130."""
    from selfplay.cli.view import open_view, print_summary

    with open_view(title, json=as_json) as view:
        summary = work(view)
    if as_json:
        click.echo(msgspec.json.encode(summary).decode())
    else:
        print_summary(summary)
    if summary.outcome == "interrupted":
        raise SystemExit(EXIT_INTERRUPTED)
