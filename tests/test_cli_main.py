"""The command line's edges: help, unknown commands, and which error becomes which exit code and output."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import click
import pytest
from tests.patience import PATIENCE_S

from selfplay.cli.main import cli, main, run
from selfplay.cli.options import FiniteRange
from selfplay.errors import EnvironmentFault, IllegalMove, MissingExtraError, StoreError, UnknownNameError, UserError

COMMANDS = (
    "train", "sft", "resume", "play", "eval", "tournament", "match", "rate", "replay", "pool", "env", "runs", "bench",
    "doctor",
)  # fmt: skip


def group_that(action: Callable[[], object]) -> click.Group:
    """A command group with one command, ``go``, that does ``action``."""
    group = click.Group()
    group.add_command(click.Command("go", callback=action))
    return group


def raises(error: BaseException) -> Callable[[], None]:
    def action() -> None:
        raise error

    return action


def test_help_lists_every_command_on_one_screen(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) <= 24
    assert max(map(len, lines)) <= 100
    listed = [line.split()[0] for line in lines[lines.index("Commands:") + 1 :]]
    assert tuple(listed) == COMMANDS


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_one_screen_of_help(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([name, "--help"]) == 0
    out = capsys.readouterr().out
    assert out.startswith(f"Usage: selfplay {name}")
    assert len(out.splitlines()) <= 40


def test_no_command_shows_the_help_and_is_a_mistake(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("Usage: selfplay")


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["trian"], "selfplay: unknown command 'trian'; did you mean 'train'?"),
        (["--nonsense"], "selfplay: No such option '--nonsense'; see  selfplay --help"),
        (["bench", "rolout"], "selfplay: unknown benchmark 'rolout'; did you mean 'rollout'?"),
        (["bench"], "selfplay: Missing argument 'NAME|all|list'; see  selfplay bench --help"),
    ],
)
def test_a_mistake_is_one_line_and_exit_2(arguments: list[str], line: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err == line + "\n"


@pytest.mark.parametrize(
    ("error", "code", "line"),
    [
        (UserError("no"), 2, "selfplay: no"),
        (UnknownNameError("seat", "prp", ["pro", "con"]), 2, "selfplay: unknown seat 'prp'; did you mean 'pro'?"),
        (
            MissingExtraError("x", "envs", "y"),
            2,
            "selfplay: x needs the package 'y': install it with  pip install -e '.[envs]'  in selfplay's folder",
        ),
        (StoreError("disk full"), 1, "selfplay: disk full"),
        (KeyboardInterrupt(), 130, "selfplay: interrupted"),
        (click.UsageError("two files"), 2, "selfplay: two files; see  selfplay go --help"),
        (click.Abort(), 130, "selfplay: interrupted"),
    ],
    ids=lambda x: type(x).__name__ if isinstance(x, BaseException) else "",
)
def test_errors_become_exit_codes(
    error: BaseException, code: int, line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(group_that(raises(error)), ["go"]) == code
    captured = capsys.readouterr()
    assert captured.err.splitlines() == [line]
    assert captured.out == ""


def test_an_environments_bug_keeps_its_own_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    trace = 'Traceback (most recent call last):\n  File "game.py", line 3, in step\nValueError: bad card 53\n'
    fault = EnvironmentFault(env="poker-v0", seed=7, seat="dealer", turn=4, traceback=trace)
    assert run(group_that(raises(fault)), ["go"]) == 1
    lines = capsys.readouterr().err.splitlines()
    assert lines[:3] == trace.splitlines()
    assert lines[-1] == "selfplay: poker-v0 raised at turn 4 (seat dealer, seed 7): ValueError: bad card 53"


@pytest.mark.parametrize("error", [ZeroDivisionError("bug"), IllegalMove("bug"), BrokenPipeError("a socket's")])
def test_a_bug_keeps_its_traceback(error: Exception) -> None:
    """A broken pipe is quiet only when it is standard output's reader that left."""
    with pytest.raises(type(error)):
        run(group_that(raises(error)), ["go"])


def test_a_command_may_return_its_exit_code() -> None:
    assert run(group_that(lambda: 1), ["go"]) == 1
    assert run(group_that(lambda: None), ["go"]) == 0
    assert run(group_that(lambda: click.get_current_context().exit(3)), ["go"]) == 3


def _child(code: str, **options: int) -> subprocess.Popen[bytes]:
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **options}
    program = f"import sys, click, time\nfrom selfplay.cli.main import run\n@click.group()\ndef g(): pass\n{code}\nsys.exit(run(g, ['go']))"
    return subprocess.Popen([sys.executable, "-c", program], **pipes)


def test_a_reader_that_leaves_is_no_error() -> None:
    child = _child("@g.command()\ndef go():\n    while True: click.echo('line ' * 50)")
    assert child.stdout is not None
    assert child.stderr is not None
    child.stdout.readline()
    child.stdout.close()
    assert child.wait(30) == 141
    assert child.stderr.read() == b""
    child.stderr.close()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_is_130_and_one_line(number: signal.Signals) -> None:
    child = _child("@g.command()\ndef go():\n    click.echo('up'); sys.stdout.flush(); time.sleep(60)")
    assert child.stdout is not None
    child.stdout.readline()
    os.kill(child.pid, number)
    _, err = child.communicate(timeout=PATIENCE_S)
    assert (child.returncode, err.decode().strip()) == (130, "selfplay: interrupted")


@pytest.mark.parametrize("command", [("env", "list"), ("--version",), ("play", "nim-v0", "--json")])
def test_output_that_cannot_be_written_is_one_line(command: tuple[str, ...]) -> None:
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "selfplay.cli.main", *command],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
    assert done.returncode == 1
    assert done.stderr == "selfplay: cannot write its output: No space left on device\n"


def test_closed_standard_output_is_output_to_nowhere() -> None:
    done = subprocess.run(
        ["sh", "-c", f"{sys.executable} -m selfplay.cli.main env list >&-"], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_a_game_that_writes_past_sys_stdout_leaves_json_whole(tmp_path: Path) -> None:
    (tmp_path / "loud.py").write_text(
        "import os\nfrom selfplay_envs.nim import Nim\n\nclass Loud(Nim):\n    def step(self, moves):\n"
        "        os.write(1, b'raw\\n')\n        os.system('echo child')\n        super().step(moves)\n"
    )
    done = subprocess.run(
        [sys.executable, "-m", "selfplay.cli.main", "play", str(tmp_path / "loud.py"), "--json"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert len(json.loads(done.stdout)["episodes"]) == 1
    assert "raw\n" in done.stderr
    assert "child\n" in done.stderr


def test_a_number_option_refuses_nan() -> None:
    with pytest.raises(click.BadParameter, match="not a finite number"):
        FiniteRange(0.0, 1.0).convert("nan", None, None)


def test_no_option_takes_nan() -> None:
    """`click.FloatRange` lets it through; so every number option is a `FiniteRange`."""
    floats = [
        o
        for c in all_commands(cli)
        for o in c.params
        if isinstance(o.type, click.types.FloatRange | click.types.FloatParamType)
    ]
    assert floats
    assert [o.name for o in floats if not isinstance(o.type, FiniteRange)] == []


def all_commands(command: click.Command) -> Iterator[click.Command]:
    """A command and all below it."""
    yield command
    if isinstance(command, click.Group):
        context = click.Context(command)
        for name in command.list_commands(context):
            below = command.get_command(context, name)
            assert below is not None
            yield from all_commands(below)
