"""``selfplay bench``: run the benchmarks by name.

In: a name and a size. Out: one report per benchmark, as a table or, with ``--json``, as one JSON object per line on
standard output and nothing else there. Progress goes to standard error. A benchmark is a module of ``selfplay.bench`` with a
``run(quick)`` that returns its rows; it is imported only when it runs.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Iterator, Sequence
from importlib import import_module
from typing import TYPE_CHECKING, TextIO

import click

from selfplay.errors import MissingExtraError, RunError, UnknownNameError

if TYPE_CHECKING:
    from selfplay.bench.report import Report

BENCHES = {
    "rollout": "tokens per second of the policy server against raw vLLM",
    "sync": "publishing adapters while generation goes on",
    "train": "packed whole trajectories against the usual padded trainer",
    "pool": "what the environment pool costs per turn",
    "envs": "turns per second of native and adapted games against the bare library",
    "envs-compat": "which games of other libraries pass env check (half an hour)",
    "async": "time and staleness of each mode, with an engine of set speed",
    "ratings": "coverage and width of rating intervals, time of a fit",
    "dynamics": "what makes self-play converge: thirteen ways to train, on a table (ten minutes)",
    "learn-kuhn": "whole training runs to near equilibrium, three seeds (an hour and more)",
    "learn-chat": "a real chat model learns Kuhn poker (half an hour)",
}
MODULES = {
    "async": "asynchrony",
    "envs-compat": "envs_compat",
    "learn-kuhn": "learn_kuhn",
    "learn-chat": "learn_chat",
}
"""Where the module has another name than the benchmark: async is a word of the language."""
SLOW = ("envs-compat", "dynamics", "learn-kuhn", "learn-chat")
"""Asked for by name only."""
EXTRA_OF = {
    "pyspiel": "envs",
    "pettingzoo": "envs",
    "textarena": "envs",
    "torch": "train",
    "transformers": "train",
    "peft": "train",
    "vllm": "vllm-cpu",
    "psutil": "dev",
    "numpy": "league",
    "scipy": "league",
}


@click.command()
@click.argument("name", metavar="NAME|all|list")
@click.option("--json", "as_json", is_flag=True, help="One JSON object per benchmark on stdout, nothing else there.")
@click.option("--quick", is_flag=True, help="Small sizes, few repeats: shows that it runs, not how fast.")
def command(name: str, as_json: bool, quick: bool) -> None:
    """Measure on this machine: rollout, sync, train, pool, async, envs, ratings, or all (the slow ones by name only).

    Every figure of speed stands beside a reference that was measured in the same run.
    """
    if name == "list":
        click.echo("\n".join(f"{bench:<10} {about}" for bench, about in BENCHES.items()))
        return
    if name != "all" and name not in BENCHES:
        raise UnknownNameError("benchmark", name, [*BENCHES, "all", "list"])
    for bench in [b for b in BENCHES if b not in SLOW] if name == "all" else [name]:
        show(measure(bench, f"selfplay.bench.{MODULES.get(bench, bench)}", quick=quick), as_json=as_json)


def measure(bench: str, module: str, *, quick: bool) -> Report:
    """Run one benchmark; whatever it or its libraries print goes to standard error."""
    from selfplay.bench.report import Report, describe_machine
    from selfplay.cli.doctor_probe import gpu_names

    started = time.monotonic()
    print(f"bench {bench}: {BENCHES.get(bench, '')} …", file=sys.stderr, flush=True)
    with stdout_to_stderr():
        try:
            rows: Sequence[object] = import_module(module).run(quick=quick)
        except ModuleNotFoundError as e:
            raise missing(bench, e) from e
    print(f"bench {bench}: {time.monotonic() - started:.0f} s", file=sys.stderr, flush=True)
    if not rows:
        raise RunError(f"bench {bench} measured nothing")
    return Report(bench=bench, machine=describe_machine(tuple(gpu_names())), results=tuple(rows))  # type: ignore[arg-type]


def missing(bench: str, error: ModuleNotFoundError) -> Exception:
    """The remedy for a package of an extra; any other missing module is a bug and stays what it is."""
    package = (error.name or "").partition(".")[0]
    extra = EXTRA_OF.get(package)
    return error if extra is None else MissingExtraError(f"bench {bench}", extra, package)


def show(report: Report, *, as_json: bool) -> None:
    """Print a report on standard output."""
    import msgspec

    from selfplay.bench.report import table

    click.echo(msgspec.json.encode(report) if as_json else table(report) + "\n")


@contextlib.contextmanager
def stdout_to_stderr() -> Iterator[None]:
    """Send standard output, of child processes and C libraries too, to standard error meanwhile."""
    stdout: TextIO = sys.stdout
    stdout.flush()
    kept = os.dup(1)
    os.dup2(2, 1)
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield
    finally:
        os.dup2(kept, 1)
        os.close(kept)
