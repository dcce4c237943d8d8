"""The ``selfplay`` command: finds the subcommand, and is the one place where errors become exit codes.

In: the command line. Out: exit 0; 2 with one line for a user's mistake; 1 with one line for a fault of a run; 130 after
Ctrl-C or SIGTERM. Anything else is a bug and keeps its traceback. A subcommand's module is imported only when that
command is run or asked for its help, so that nothing heavy is loaded to print a list of commands.
"""

from __future__ import annotations

import contextlib
import errno
import os
import select
import signal
import sys
import threading
from collections.abc import Sequence
from importlib import import_module
from typing import NamedTuple

import click

from selfplay.errors import EXIT_FAULT, EXIT_OK, EXIT_USER, EnvironmentFault, RunError, UserError, suggestion

EXIT_INTERRUPTED = 130
_OUTPUT_ERRORS = (errno.ENOSPC, errno.EIO, errno.EBADF)
EXIT_PIPE_CLOSED = 141
"""What a shell reports for a program that SIGPIPE ended."""


class _Entry(NamedTuple):
    module: str
    attribute: str
    summary: str


_COMMANDS = {
    "train": _Entry("selfplay.cli.train_cmd", "command", "Train agents by self-play in an environment."),
    "sft": _Entry("selfplay.cli.sft_cmd", "command", "Teach a model a game's answer format before self-play."),
    "resume": _Entry("selfplay.cli.train_cmd", "resume", "Go on with a run from its last checkpoint."),
    "play": _Entry("selfplay.cli.play_cmd", "command", "Watch or play one game in the terminal."),
    "eval": _Entry("selfplay.cli.eval_cmd", "command", "Evaluate a checkpoint: exactly, or against opponents."),
    "tournament": _Entry("selfplay.cli.tournament_cmd", "command", "Rate frozen players against each other."),
    "match": _Entry("selfplay.cli.tournament_cmd", "match", "Two players until a sequential test decides."),
    "rate": _Entry("selfplay.cli.tournament_cmd", "rate", "Rate a tournament again without playing."),
    "replay": _Entry("selfplay.cli.tournament_cmd", "replay", "Show a game of a tournament or run turn by turn."),
    "pool": _Entry("selfplay.cli.pool_cmd", "command", "Play games for a run of another process or host."),
    "env": _Entry("selfplay.cli.env_cmd", "command", "List and inspect environments."),
    "runs": _Entry("selfplay.cli.runs_cmd", "command", "List and inspect runs."),
    "bench": _Entry("selfplay.cli.bench_cmd", "command", "Measure speed against references on this machine."),
    "doctor": _Entry(
        "selfplay.cli.doctor_cmd", "command", "Show what is installed, what would run and what is missing."
    ),
}


class LazyGroup(click.Group):
    """A group that knows its commands by name and imports one when it is needed."""

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002
        return list(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:  # noqa: ARG002
        entry = _COMMANDS.get(cmd_name)
        if entry is None:
            return None
        command = getattr(import_module(entry.module), entry.attribute)
        if not isinstance(command, click.Command):
            raise TypeError(f"{entry.module}.{entry.attribute} is not a click command")
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args and not args[0].startswith("-") and args[0] not in _COMMANDS:
            raise UserError(f"unknown command {args[0]!r}{suggestion(args[0], _COMMANDS)}")
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:  # noqa: ARG002
        with formatter.section("Commands"):
            formatter.write_dl([(name, entry.summary) for name, entry in _COMMANDS.items()])


def _print_version(ctx: click.Context, _param: click.Parameter, value: bool) -> None:
    if value and not ctx.resilient_parsing:
        from importlib.metadata import version  # not at the top: it costs more than all of --help

        click.echo(f"selfplay {version('selfplay')}")
        ctx.exit()


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.option(
    "--version",
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=_print_version,
    help="Show the version and exit.",
)
def cli() -> None:
    """\b
    Train language-model agents against and with each other in multi-turn games.
    Start with:  selfplay train --env debate-v0
    """


def main(argv: Sequence[str] | None = None) -> int:
    """Run one ``selfplay`` command line and return its exit code."""
    return run(cli, sys.argv[1:] if argv is None else argv)


def run(group: click.Group, argv: Sequence[str]) -> int:
    """Run a command of ``group``; errors end here and become an exit code and, on standard error, a line."""
    try:
        _answer_sigterm_like_ctrl_c()
        _require_output()
        if "--json" in argv:
            _keep_output_for_results()
        result = _invoke(group, list(argv))
        sys.stdout.flush()
        return result if isinstance(result, int) else EXIT_OK
    except click.exceptions.Exit as e:
        return e.exit_code
    except UserError as e:
        return _complain(f"selfplay: {e}", EXIT_USER)
    except RunError as e:
        return _complain(f"selfplay: {e}", EXIT_FAULT)
    except EnvironmentFault as e:
        return _complain(f"{e.traceback.rstrip()}\nselfplay: {e}", EXIT_FAULT)
    except click.exceptions.NoArgsIsHelpError as e:
        return _complain(e.format_message(), EXIT_USER)
    except click.ClickException as e:
        return _complain(f"selfplay: {_usage_line(e)}", EXIT_USER)
    except (KeyboardInterrupt, click.Abort):
        return _complain("selfplay: interrupted", EXIT_INTERRUPTED)
    except BrokenPipeError:
        if not _output_closed():
            raise
        _forget_output()
        return EXIT_PIPE_CLOSED
    except OSError as e:
        if e.errno not in _OUTPUT_ERRORS or e.filename is not None:
            raise  # files are written through the store, which names them; what has no name is a stream
        _forget_output()
        return _complain(f"selfplay: cannot write its output: {e.strerror}", EXIT_FAULT)


def _invoke(group: click.Group, argv: list[str]) -> object:
    """What ``group.main`` does, without its own handling of interrupts and broken pipes: a child's pipe that breaks must
    not look like a reader that has left."""
    with group.make_context("selfplay", argv) as context:
        return group.invoke(context)


def _answer_sigterm_like_ctrl_c() -> None:
    """A scheduler or a container's end asks for what a person asks for with Ctrl-C: leave in order, keep what there is."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, signal.default_int_handler)


def _require_output() -> None:
    """Standard output closed by the caller is treated as sent to nowhere: a command's work does not depend on it."""
    if sys.stdout is None:
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115, PTH123  lives as long as the process


def _keep_output_for_results() -> None:
    """What is written past `sys.stdout`, by C code of a game's library or by a child, goes to standard error."""
    try:
        if sys.stdout.fileno() != 1:
            return
        sys.stdout.flush()
        kept = os.dup(1)
        os.dup2(2, 1)
    except (OSError, ValueError):  # standard output is no descriptor, or there is no standard error
        return
    sys.stdout = open(kept, "w", encoding=sys.stdout.encoding, errors=sys.stdout.errors)  # noqa: SIM115, PTH123  as above


def _complain(message: str, code: int) -> int:
    with contextlib.suppress(BrokenPipeError):
        print(message, file=sys.stderr)
    return code


def _usage_line(error: click.ClickException) -> str:
    """Click's message as one line that ends with where to read on."""
    message = " ".join(error.format_message().split()).rstrip(".")
    context = getattr(error, "ctx", None)
    return f"{message}; see  {context.command_path} --help" if context is not None else message


def _output_closed() -> bool:
    """True when the reader of standard output is gone: only then is a broken pipe not a fault of ours."""
    try:
        descriptor = sys.stdout.fileno()
    except (OSError, ValueError):
        return False
    poller = select.poll()
    poller.register(descriptor, 0)
    return bool(poller.poll(0))


def _forget_output() -> None:
    """Point standard output at nothing, so that the interpreter's last flush is quiet."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    os.close(nowhere)


if __name__ == "__main__":
    sys.exit(main())
