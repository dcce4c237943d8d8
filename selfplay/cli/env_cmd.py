"""``selfplay env``: which environments are installed, and what one of them is.

Listing reads entry points only and imports no plugin. ``info`` lets a child process import the one environment asked
for, within a time limit.
"""

from __future__ import annotations

from collections import defaultdict

import click
import msgspec

from selfplay.cli import env_check_cmd, env_hub_cmd, env_new_cmd, env_replay_cmd
from selfplay.cli.options import FiniteRange
from selfplay.config.load import parse_override

json_option = click.option("--json", "as_json", is_flag=True, help="JSON on standard output, and nothing else there.")


_MAX_SHOWN = 80
"""Characters of an id in a list."""


class _Row(msgspec.Struct, frozen=True, kw_only=True):
    """One line of the list."""

    id: str
    source: str
    entry_point: str
    problem: str


@click.group()
def command() -> None:
    """List, inspect, write, check, publish and install environments."""


for part in (
    env_new_cmd.command,
    env_check_cmd.command,
    env_hub_cmd.publish,
    env_hub_cmd.install,
    env_replay_cmd.command,
):
    command.add_command(part)


@command.command("list")
@click.argument("scheme", required=False, metavar="[SCHEME:]")
@env_hub_cmd.hub_option
@json_option
def list_(scheme: str | None, hub: str | None, as_json: bool) -> None:
    """Show every installed environment, with --hub those in a hub, with a scheme like openspiel: a library's games.

    A broken one is a line that says so.
    """
    rows = _rows_of_hub(hub) if hub is not None else _rows() if scheme is None else _rows_of_library(scheme)
    if as_json:
        click.echo(msgspec.json.encode({"environments": rows}).decode())
        return
    if not rows:
        click.echo("no environments are installed" if hub is None else "the hub is empty")
    from selfplay.play.text import printable

    shown = [(printable(r.id[:_MAX_SHOWN]), printable(r.source), printable(r.problem)) for r in rows]
    width = max((len(name) for name, _, problem in shown if not problem), default=0)
    for name, source, problem in shown:
        click.echo(f"{name:<{width}}  {source}" + (f"  broken: {problem}" if problem else ""))
    if hub is None and scheme is None:
        from selfplay.registry import list_entries
        from selfplay.registry.entries import ADAPTERS

        schemes = ", ".join(f"{e.id}:" for e in list_entries(ADAPTERS))
        click.echo(f"games of other libraries: {schemes or 'none'}  (selfplay env list SCHEME: shows them)")


@command.command()
@click.argument("env")
@click.option("-p", "params", multiple=True, metavar="KEY=VALUE", help="Parameter of the environment; repeatable.")
@click.option(
    "--timeout",
    "timeout_s",
    default=20.0,
    type=FiniteRange(1, 86_400),
    show_default=True,
    help="Seconds the environment may take to import.",
)
@env_hub_cmd.hub_option
@json_option
def info(env: str, params: tuple[str, ...], timeout_s: float, hub: str | None, as_json: bool) -> None:
    """Show seats, rewards, limits, parameters and rules of ENV, an id or a Python file.

    With --hub: what a hub says of it (versions, seats, hash, check report), without installing it.
    """
    if hub is not None:
        _info_of_hub(env, hub, as_json)
        return
    from selfplay.play.text import printable
    from selfplay.registry import describe

    spec = describe(env, dict(parse_override(text) for text in params), timeout_s)
    if as_json:
        click.echo(msgspec.json.encode(spec).decode())
        return
    facts = {
        "id": spec.id,
        "source": spec.source,
        "seats": ", ".join(spec.seats),
        "rewards": f"{spec.reward_range[0]:g} to {spec.reward_range[1]:g}" + (", zero-sum" if spec.zero_sum else ""),
        "limits": f"{spec.max_turns} turns, {spec.max_move_tokens} tokens per move",
        "at once": "any number of games" if spec.concurrent else "one game in each worker",
        "illegal": f"{spec.forfeit.retries + 1} tries, then forfeit: {spec.forfeit.offender:+g}, others {spec.forfeit.others:+g}",
        "jury": "needed" if spec.needs_jury else "none",
        "parameters": ", ".join(f"{k}={_toml(v)}" for k, v in spec.parameters.items()) or "none",
    }
    for name, text in facts.items():
        click.echo(f"{name:<11} {printable(text)}")
    click.echo(f"\n{printable(spec.rules)}")


def _rows() -> list[_Row]:
    from selfplay.registry import ENVIRONMENTS, list_entries

    offers = defaultdict(list)
    for entry in list_entries(ENVIRONMENTS):
        offers[entry.id].append(entry)
    rows = []
    for env_id, entries in offers.items():
        problem = entries[0].problem()
        if len(entries) > 1:
            problem = f"offered by {' and by '.join(e.source for e in entries)}: uninstall one of them"
        rows.append(_Row(id=env_id, source=entries[0].source, entry_point=entries[0].target, problem=problem))
    return rows


def _info_of_hub(name: str, hub: str, as_json: bool) -> None:
    from selfplay.play.text import printable
    from selfplay.registry.hub import find_published, published

    folder = env_hub_cmd.hub_folder(hub)
    entry = find_published(folder, name)
    if as_json:
        click.echo(msgspec.json.encode(entry).decode())
        return
    versions = [p.version for p in published(folder) if p.project == entry.project]
    click.echo(
        f"project     {entry.project} {entry.version}  (versions: {', '.join(versions)})\nwheel       {entry.wheel}"
    )
    for environment in entry.environments:
        checks = ", ".join(f"{k} {v}" for k, v in environment.checks.items())
        facts = {
            "id": environment.id,
            "source": environment.source,
            "seats": ", ".join(environment.seats),
            "checks": checks,
        }
        click.echo("\n".join(f"{k:<11} {printable(v)}" for k, v in {**facts, "rules": environment.doc}.items()))


def _rows_of_library(scheme: str) -> list[_Row]:
    from selfplay.registry.describe import adapted_names

    names = adapted_names(scheme.rstrip(":"))
    return [_Row(id=f"{scheme.rstrip(':')}:{name}", source="", entry_point="", problem="") for name in names]


def _rows_of_hub(hub: str) -> list[_Row]:
    from selfplay.play.text import printable
    from selfplay.registry.hub import read_hub

    held = read_hub(env_hub_cmd.hub_folder(hub))
    broken = [
        _Row(id=printable(path), source="", entry_point="", problem=printable(why)) for path, why in held.broken.items()
    ]
    return broken + [
        _Row(
            id=e.id,
            source=f"{p.project} {p.version} {e.source.split()[-1]}",
            entry_point=", ".join(e.seats),
            problem="",
        )
        for p in held.wheels
        for e in p.environments
    ]


def _toml(value: object) -> str:
    return msgspec.json.encode(value).decode()
