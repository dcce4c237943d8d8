"""``selfplay env check``: one line per check, as each is done; exit 1 when the environment is not sound."""

from __future__ import annotations

import time

import click
import msgspec

from selfplay.cli.options import FiniteRange
from selfplay.config.load import parse_override

MARKS = {"ok": "ok   ", "note": "note ", "fault": "FAULT"}


@click.command("check")
@click.argument("env")
@click.option("-p", "params", multiple=True, metavar="KEY=VALUE", help="Parameter of the environment; repeatable.")
@click.option(
    "--games", default=200, show_default=True, type=click.IntRange(3, 100_000), help="Random games, time permitting."
)
@click.option(
    "--timeout",
    "limit_s",
    default=60.0,
    type=FiniteRange(1, 86_400),
    show_default=True,
    help="Seconds for everything together.",
)
@click.option("--json", "as_json", is_flag=True, help="JSON on standard output, and nothing else there.")
def command(env: str, params: tuple[str, ...], games: int, limit_s: float, as_json: bool) -> int:
    """Check whether ENV, an id or a Python file, is sound: played at random, in a process of its own.

    Same seed same game (again, beside others, in other processes, from a copy), rules kept, illegal answers, hidden
    information, simultaneous moves, endings, rewards, seats, text, time, memory, output, what is left behind.
    """
    from selfplay.check import Check, check_environment
    from selfplay.play.text import printable

    def show(check: Check) -> None:
        if as_json:
            return
        click.echo(f"{MARKS[check.status]}  {check.name:<14} {printable(check.text)}")
        for finding in check.findings[:1] if check.status == "fault" else ():
            if finding.reproduce:
                click.echo(f"{'':22}see it:  {finding.reproduce}")

    started = time.perf_counter()
    values = dict(parse_override(text) for text in params)
    report = check_environment(env, values, num_games=games, limit_s=limit_s, emit=show)
    if as_json:
        click.echo(msgspec.json.encode(report).decode())
    else:
        verdict = f"{len(report.faults)} of {len(report.checks)} checks failed" if report.faults else "sound"
        took = f"{time.perf_counter() - started:.1f} s"
        click.echo(f"{printable(report.env)} ({printable(report.source)}): {verdict}; {report.num_games} games, {took}")
    return 1 if report.faults else 0
