"""From an id to an instance: files, parameters, descriptions from outside."""

from __future__ import annotations

import os
import random
import sys
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from selfplay.errors import ConfigError, EnvironmentFault, UserError
from selfplay.registry import (
    ENVIRONMENTS,
    EnvironmentSpec,
    Parameter,
    check_values,
    declared_parameters,
    describe,
    environment_source,
    load_environment,
    make_environment,
    resolve_environment_id,
)
from toy_games import write_distribution

NIM = Path(__file__).with_name("sticks.py")
REST = "to_move = view = step = outcome = lambda self, *_: ()"
"""What makes a class a game."""


def test_a_file_is_an_environment() -> None:
    env_id = resolve_environment_id(str(NIM.relative_to(Path.cwd())) if NIM.is_relative_to(Path.cwd()) else str(NIM))
    assert env_id == str(NIM.resolve())
    game = make_environment(env_id, {"heap": 5}, seed=1)
    assert game.seats == ("first", "second")
    assert environment_source(env_id).startswith("file sticks.py ")
    spec = describe(str(NIM))
    assert spec.parameters == {"heap": 21}
    assert spec.id == env_id


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("x = 1\n", "exactly one Environment subclass, found 0"),
        ("from selfplay import Environment\nclass A(Environment): ...\nclass B(Environment): ...\n", "found 2: A, B"),
        ("import nothing_of_that_name\n", "ModuleNotFoundError"),
        ("raise SystemExit\n", "SystemExit"),
        ("def f(:\n", "SyntaxError"),
    ],
)
def test_files_that_hold_no_game(tmp_path: Path, source: str, message: str) -> None:
    path = tmp_path / "game.py"
    path.write_text(source, "utf-8")
    with pytest.raises(UserError, match=message):
        load_environment(str(path))


def test_a_missing_file_and_a_folder() -> None:
    for bad in ("./no_such.py", "/no/such/dir/x.py", "a\0b.py", "x" * 300 + ".py"):
        with pytest.raises(UserError):
            resolve_environment_id(bad)


def test_an_imported_base_in_a_file_is_not_counted(tmp_path: Path) -> None:
    path = tmp_path / "game.py"
    path.write_text(
        "from selfplay import Environment\nclass _Helper(Environment): ...\nclass Mine(_Helper): ...\n", "utf-8"
    )
    assert load_environment(str(path)).__name__ == "Mine"


def test_not_an_environment_class(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    points = {ENVIRONMENTS: {"notgame-v0": "not_game:Thing"}}
    write_distribution(tmp_path, "not-game", modules={"not_game": "class Thing: ...\n"}, entry_points=points)
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(UserError, match=r"not-game 1\.0 is not a subclass"):
        load_environment("notgame-v0")


def test_parameters_are_checked_by_name_and_kind() -> None:
    with pytest.raises(ConfigError, match="no parameter 'plaers'; did you mean 'players'"):
        make_environment("kuhn-poker-v0", {"plaers": 3}, 0)
    with pytest.raises(ConfigError, match=r"'players' is '3' \(str\), expected int"):
        make_environment("kuhn-poker-v0", {"players": "3"}, 0)
    with pytest.raises(ConfigError, match="expected int"):
        make_environment("kuhn-poker-v0", {"players": True}, 0)
    with pytest.raises(ConfigError, match="expected int"):
        make_environment("kuhn-poker-v0", {"players": 2**70}, 0)
    with pytest.raises(ConfigError, match="kuhn-poker-v0: players is 9; the game is for 2 to 4"):
        make_environment("kuhn-poker-v0", {"players": 9}, 0)
    with pytest.raises(ConfigError, match="it has no parameters"):
        make_environment("tictactoe-v0", {"size": 3}, 0)
    assert make_environment("debate-v0", {"margin": 0}, 0)  # an int is a fine float


def test_declarations_without_type_or_default_are_refused() -> None:
    class NoDefault:
        def __init__(self, rng: random.Random, heap: int) -> None: ...

    class NoKind:
        def __init__(self, rng: random.Random, heap: list[int] = []) -> None: ...  # noqa: B006

    class Anything:
        def __init__(self, rng: random.Random, **rest: int) -> None: ...

    class Fine:
        def __init__(self, rng: random.Random, share: float = 1, name="x") -> None: ...  # type: ignore[no-untyped-def]

    for bad in (NoDefault, NoKind, Anything):
        with pytest.raises(UserError, match="parameter"):
            declared_parameters("game", bad.__init__)
    share, name = declared_parameters("game", Fine.__init__)
    assert (share.kind, share.default, name.kind) == ("float", 1.0, "str")


scalars = st.one_of(st.booleans(), st.integers(), st.floats(), st.text(max_size=5))


@given(st.sampled_from(["bool", "int", "float", "str"]), scalars)
def test_a_value_is_returned_in_its_kind_or_refused(kind: str, value: bool | int | float | str) -> None:
    defaults: dict[str, bool | int | float | str] = {"bool": False, "int": 1, "float": 0.5, "str": "d"}
    parameter = Parameter(name="p", kind=kind, default=defaults[kind])
    try:
        (out,) = check_values("game", [parameter], {"p": value}).values()
    except ConfigError:
        assert type(value).__name__ != kind or value != value or value in (float("inf"), -float("inf")) or kind == "int"
    else:
        assert type(out).__name__ == kind
        assert out == value or (kind == "str" and out == str(value))  # digits are text too


def test_a_game_without_a_method_is_told_which(tmp_path: Path) -> None:
    path = tmp_path / "game.py"
    path.write_text("from selfplay import Environment\nclass G(Environment):\n def step(self, moves): ...\n", "utf-8")
    with pytest.raises(UserError, match=r"class G has no outcome\(\), to_move\(\), view\(\): every game needs them"):
        make_environment(str(path), {}, seed=7)


def test_a_constructor_that_raises_is_the_environments_fault(tmp_path: Path) -> None:
    path = tmp_path / "game.py"
    source = f"from selfplay import Environment\nclass G(Environment):\n {REST}\n def __init__(self, rng):\n  raise KeyError('deck')\n"
    path.write_text(source, "utf-8")
    with pytest.raises(EnvironmentFault, match="KeyError: 'deck'") as caught:
        make_environment(str(path), {}, seed=7)
    assert caught.value.seed == 7
    assert "game.py" in caught.value.traceback


def test_the_same_seed_gives_the_same_game() -> None:
    views = [make_environment("debate-v0", {}, seed).view("pro") for seed in (1, 1, 2, 3, 4)]
    assert views[0] == views[1]
    assert len(set(views)) > 1


# ── describe: in a child process ──────────────────────────────────────────────────────────────────


def test_describe_first_party() -> None:
    spec = describe("kuhn-poker", {"players": 3})
    assert spec.id == "kuhn-poker-v0"
    assert spec.source.startswith("selfplay ")
    assert spec.seats == ("player_0", "player_1", "player_2")
    assert (spec.reward_range, spec.zero_sum, spec.needs_jury) == ((-2.0, 4.0), True, False)
    assert spec.parameters == {"players": 2, "wording": "plain"}
    assert spec.doc
    assert msgspec.json.decode(msgspec.json.encode(spec), type=EnvironmentSpec) == spec
    assert describe("debate-v0").needs_jury


def test_describe_does_not_import_the_environment_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _child_game(tmp_path, monkeypatch, "")
    assert describe("child-v0").seats == ("a", "b")
    assert "child_game" not in sys.modules


def test_describe_refuses_bad_parameters_with_the_childs_words() -> None:
    with pytest.raises(ConfigError, match="did you mean 'players'"):
        describe("kuhn-poker-v0", {"player": 3})


def test_an_endless_import_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _child_game(tmp_path, monkeypatch, "while True: pass")
    with pytest.raises(UserError, match=r"'child-v0' was not imported and built within 1\.5 s"):
        describe("child-v0", timeout_s=1.5)


def test_prints_do_not_break_the_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    _child_game(tmp_path, monkeypatch, "import os; print('noise\\n' * 10_000); os.write(1, b'raw noise')")
    assert describe("child-v0").seats == ("a", "b")
    out = capfd.readouterr()
    assert "noise" not in out.out + out.err


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("import os; os._exit(139)", "exit code 139"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", "SIGKILL"),
        ("raise SystemExit(0)", "SystemExit"),
        ("import sys; sys.stderr.write('last words'); sys.stderr.flush(); import os; os._exit(3)", "last words"),
    ],
)
def test_a_child_that_dies_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: str, message: str) -> None:
    _child_game(tmp_path, monkeypatch, code)
    with pytest.raises(UserError, match=message):
        describe("child-v0")


def test_secrets_do_not_reach_the_child(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SELFPLAY_API_KEY", "sk-canary")
    monkeypatch.setenv("HF_TOKEN", "hf-canary")
    _child_game(
        tmp_path,
        monkeypatch,
        "import os; leak = [v for v in os.environ.values() if v in ('sk-canary', 'hf-canary')]; assert not leak, leak",
    )
    assert describe("child-v0").seats == ("a", "b")


def _child_game(folder: Path, monkeypatch: pytest.MonkeyPatch, code: str) -> None:
    source = f"from selfplay import Environment\n{code}\nclass Game(Environment):\n    seats = ('a', 'b')\n    {REST}\n"
    points = {ENVIRONMENTS: {"child-v0": "child_game:Game"}}
    write_distribution(folder, "child-game", modules={"child_game": source}, entry_points=points)
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.setenv(
        "PYTHONPATH", os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
    )
