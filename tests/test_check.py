"""``selfplay env check``: every kind of fault is found by the check that is for it, and hostile code ends in a report."""

from __future__ import annotations

import math
import os
import random
import time
from pathlib import Path

import msgspec
import psutil
import pytest
from tests.patience import PATIENCE_S

from selfplay.check import Report, check_environment, check_here
from selfplay.cli.main import main
from selfplay.errors import ConfigError, UserError
from selfplay.registry import ENVIRONMENTS, list_entries, make_environment

FAULTY = str(Path(__file__).with_name("faulty_game.py"))
OURS = sorted(e.id for e in list_entries(ENVIRONMENTS) if e.distribution == "selfplay")


def faults(report: Report) -> dict[str, str]:
    return {c.name: c.text for c in report.faults}


@pytest.mark.parametrize("env_id", OURS)
def test_first_party_environments_are_sound(env_id: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("selfplay.check.runner.GAMES_S", math.inf)  # all 40 games, however long they take
    report = check_here(env_id, num_games=40)
    assert faults(report) == {}
    assert {c.name: c.text for c in report.checks if c.status == "note" and c.name in ("hidden", "copy")} == {}
    assert report.num_games == 40


def test_a_sound_game_is_sound() -> None:
    report = check_here(FAULTY, num_games=20)
    assert faults(report) == {}
    assert [c.name for c in report.checks] == [
        "declared", "games", "legal-moves", "illegal-moves", "simultaneous", "hidden", "text", "endings", "rewards", "seats",
        "seed", "interleaved", "processes", "global-random", "copy", "forfeit", "close", "cost", "output", "leftovers",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "check", "text"),
    [
        ("raise", "games", "raises ValueError: bad card 53 at faulty_game.py:"),
        ("rare", "games", "raises NameError: the branch of the draw at faulty_game.py:"),
        ("nan", "games", "rewards['a'] is nan"),
        ("sum", "games", "sum to 2 although zero_sum is declared"),
        ("print", "output", "prints 3606 characters"),
        ("random", "global-random", "the module random: use self.rng"),
        ("numpy", "global-random", "the module numpy.random: use self.rng"),
        ("shared", "interleaved", "beside another game of the process it differs"),
        ("hash-seed", "processes", "with PYTHONHASHSEED=1 it differs at: 0 a:"),
        ("leak", "hidden", "although the public record and its private() are the same"),
        ("growing-view", "simultaneous", "changes while the answers of its round are read"),
        ("simultaneous-leak", "simultaneous", "changes while the answers of its round are read"),
        ("surrogate", "text", "view() holds text that cannot be sent"),
        ("ambiguous", "legal-moves", "the legal move 'Y' is understood as 'y'"),
        ("lenient", "illegal-moves", "which is not a legal move"),
        ("slow-parse", "illegal-moves", "parsing 99000 characters"),
        ("close", "close", "OSError: cannot close"),
        ("endless", "endings", "games ended within max_turns = 200"),
        ("thread", "leftovers", "threads behind"),
        ("memory", "cost", "memory grows by"),
    ],
)
def test_a_fault_is_found(kind: str, check: str, text: str) -> None:
    report = check_here(FAULTY, {"kind": kind}, num_games=30)
    assert text in faults(report)[check]
    (found,) = [c for c in report.faults if c.name == check]
    if found.findings[0].seed is not None:
        assert f"-p 'kind=\"{kind}\"' --players random --seed {found.findings[0].seed}" in found.findings[0].reproduce


def test_a_game_that_is_played_one_at_a_time_is_checked_so() -> None:
    report = check_here(FAULTY, {"kind": "alone"}, num_games=5)
    assert faults(report) == {}
    assert {c.name for c in report.checks if "one at a time" in c.text} == {"interleaved", "copy"}


def test_what_cannot_be_checked_is_said() -> None:
    report = check_here(FAULTY, {"kind": "undeclared"}, num_games=5)
    assert [c.text for c in report.checks if c.name == "hidden"] == [
        "not checked: the game does not define private(seat)"
    ]


@pytest.mark.parametrize(
    ("kind", "check", "text"),
    [
        ("die", "process", "the process ended with exit code 7 during games"),
        ("sleep", "process", "games did not end within 12 s; it was at faulty_game.py:"),
        ("fork", "leftovers", "child processes behind"),
        ("process", "leftovers", "child processes behind"),
        ("raw-print", "output", "straight to the descriptor of standard output: 'raw!raw!"),
    ],
)
def test_hostile_code_ends_in_a_report_and_leaves_nothing(
    kind: str, check: str, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SELFPLAY_TEST_CHECK", kind)
    report = check_environment(FAULTY, {"kind": kind}, num_games=5, limit_s=12.0 if kind == "sleep" else 60.0)
    assert text in faults(report)[check]
    deadline = time.monotonic() + PATIENCE_S
    while _left(kind) and time.monotonic() < deadline:  # the killed are not gone at once
        time.sleep(0.05)
    assert _left(kind) == []


def _left(kind: str) -> list[int]:
    found = []
    for process in psutil.process_iter():
        try:
            if process.pid != os.getpid() and process.environ().get("SELFPLAY_TEST_CHECK") == kind:
                found.append(process.pid)
        except psutil.Error:
            continue
    return found


def test_nothing_to_check_is_a_users_mistake(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="did you mean 'nim-v0'"):
        check_environment("nimm")
    with pytest.raises(ConfigError, match="nim-v0: heaps is 'x'"):
        check_environment("nim", {"heaps": "x"})
    path = tmp_path / "broken.py"
    path.write_text("def f(:\n", "utf-8")
    with pytest.raises(UserError, match="SyntaxError"):
        check_environment(str(path))


def test_the_command_says_one_line_per_check_and_how_to_see_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["env", "check", "tictactoe", "--games", "10"]) == 0
    out = capsys.readouterr().out.splitlines()
    assert all(line.startswith(("ok   ", "note ")) for line in out[:-1])
    assert out[-1].startswith("tictactoe-v0 (selfplay ")
    assert "): sound; 10 games" in out[-1]
    assert main(["env", "check", FAULTY, "-p", "kind=raise", "--games", "5"]) == 1
    out = capsys.readouterr().out.splitlines()
    at = next(i for i, line in enumerate(out) if line.startswith("FAULT  games"))
    assert "--seed 0 --show-private" in out[at + 1]
    assert main(["env", "check", "nim", "-p", "heap=3"]) == 2


def test_the_reproducing_command_shows_the_fault(capsys: pytest.CaptureFixture[str]) -> None:
    report = check_here(FAULTY, {"kind": "rare"}, num_games=40)
    (found,) = [c for c in report.faults if c.name == "games"]
    seed = found.findings[0].seed
    assert main(["play", FAULTY, "-p", "kind=rare", "--players", "random", "--seed", str(seed)]) == 1
    assert "NameError: the branch of the draw" in capsys.readouterr().err


def test_json_is_the_report_and_nothing_else(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["env", "check", FAULTY, "-p", "kind=print", "--games", "5", "--json"]) == 1
    report = msgspec.json.decode(capfd.readouterr().out, type=Report)
    assert [c.name for c in report.faults] == ["output"]
    assert report.source.startswith("file faulty_game.py sha256:")


@pytest.mark.parametrize("env_id", OURS)
def test_a_model_that_reads_bytes_can_say_every_move(env_id: str) -> None:
    """A byte is the shortest token; what is said ends with one more."""
    longest, room = "", 0
    for seed in range(20):
        game, rng = make_environment(env_id, {}, seed), random.Random(seed)
        room = game.max_move_tokens
        for _ in range(game.max_turns):
            legal = {seat: game.legal_moves(seat) for seat in game.to_move()}
            if not legal or None in legal.values():
                break
            longest = max([longest, *(move for moves in legal.values() for move in moves or ())], key=len)
            game.step({seat: rng.choice(list(moves or ())) for seat, moves in legal.items()})
    assert len(longest.encode()) < room
