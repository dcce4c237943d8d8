"""Entry points: listing imports nothing, and whatever a plugin does at import is one clear line."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from tests.patience import PATIENCE_S

from selfplay.cli.main import main
from selfplay.errors import UnknownNameError, UserError
from selfplay.registry import (
    AGENTS,
    ALGORITHMS,
    ENVIRONMENTS,
    find_entry,
    list_entries,
    load_agent,
    load_environment,
    resolve_environment_id,
)
from toy_games import write_distribution

BROKEN = {
    "import-v0": ("bad_import", "import no_such_package_of_mine\n", "ModuleNotFoundError"),
    "syntax-v0": ("bad_syntax", "def f(:\n", "SyntaxError"),
    "exit-v0": ("bad_exit", "raise SystemExit(3)\n", "SystemExit"),
    "attribute-v0": ("bad_attribute", "x = 1\n", "AttributeError"),
    "multi-v0": ("bad_multi", "raise ValueError('one\\ntwo\\nthree')\n", "one two three"),
}


@pytest.fixture
def plugins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    modules = {module: source for module, source, _ in BROKEN.values()}
    points = {env_id: f"{module}:Game" for env_id, (module, _, _) in BROKEN.items()}
    points |= {"gone-v0": "no_such_folder.game:Game", "shapeless-v0": "bad_exit"}
    write_distribution(tmp_path, "broken-games", version="2.1", modules=modules, entry_points={ENVIRONMENTS: points})
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


def test_first_party_entries_are_listed() -> None:
    assert {"debate-v0", "kuhn-poker-v0", "tictactoe-v0"} <= {e.id for e in list_entries(ENVIRONMENTS)}
    assert {"llm", "random", "minimax", "equilibrium", "human", "api"} <= {e.id for e in list_entries(AGENTS)}
    assert list_entries(ALGORITHMS)


def test_listing_imports_no_plugin(plugins: Path) -> None:
    listed = list_entries(ENVIRONMENTS)
    assert {"import-v0", "gone-v0"} <= {e.id for e in listed}
    assert not {module for module, _, _ in BROKEN.values()} & set(sys.modules)


def test_listing_in_a_fresh_process_imports_nothing_first_party() -> None:
    code = (
        "import sys; from selfplay.registry import *; list_entries(ENVIRONMENTS); list_entries(AGENTS);"
        "print([m for m in sys.modules if m.startswith(('selfplay_envs', 'selfplay_agents', 'torch', 'vllm'))])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=PATIENCE_S, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("env_id", sorted(BROKEN))
def test_a_broken_plugin_is_one_line_that_names_it(plugins: Path, env_id: str) -> None:
    with pytest.raises(UserError) as caught:
        load_environment(env_id)
    text = str(caught.value)
    assert "broken-games 2.1" in text
    assert f"{BROKEN[env_id][0]}:Game" in text
    assert BROKEN[env_id][2] in text
    assert "\n" not in text


def test_a_deleted_package_is_seen_without_importing(plugins: Path) -> None:
    problem = find_entry(ENVIRONMENTS, "gone-v0").problem()
    assert "no_such_folder" in problem
    assert "broken-games" in problem
    assert "module:attribute" in find_entry(ENVIRONMENTS, "shapeless-v0").problem()
    assert find_entry(ENVIRONMENTS, "debate-v0").problem() == ""
    with pytest.raises(UserError, match="missing"):
        load_environment("gone-v0")


def test_other_environments_work_beside_broken_ones(plugins: Path) -> None:
    assert load_environment("tictactoe-v0").__name__ == "TicTacToe"


def test_metadata_that_cannot_be_read_is_a_line_and_hides_no_other(
    plugins: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    torn, nameless = plugins / "torn-3.0.dist-info", plugins / "nameless-1.0.dist-info"
    for folder in (torn, nameless):
        folder.mkdir()
    (torn / "METADATA").write_text("Metadata-Version: 2.1\nName: torn\nVersion: 3.0\n")
    (torn / "entry_points.txt").write_bytes(b"[selfplay.environments]\nx \xff = = y\n")
    (nameless / "entry_points.txt").write_text(
        f"[selfplay.environments]\nnameless-v0 = m:C\nred\x1b[31m-v0 = m:C\n{'z' * 300}-v0 = m:C\n"
    )
    found = {e.id: e for e in list_entries(ENVIRONMENTS)}
    assert {"kuhn-poker-v0", "import-v0", "nameless-v0"} <= set(found)
    assert found["torn"].problem().startswith("the entry points of torn 3.0 cannot be read: UnicodeDecodeError")
    assert find_entry(AGENTS, "random").distribution == "selfplay"
    assert main(["env", "list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert not any("\x1b" in line or len(line) > 400 for line in lines)
    assert any(line.startswith("kuhn-poker-v0 ") and len(line) < 60 for line in lines)


def test_two_distributions_with_one_id_are_both_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    point = {ENVIRONMENTS: {"debate-v0": "other_debate:Debate"}}
    write_distribution(tmp_path, "other-debate", modules={"other_debate": ""}, entry_points=point)
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(UserError, match=r"other-debate 1\.0 and by selfplay \d"):
        find_entry(ENVIRONMENTS, "debate-v0")
    with pytest.raises(UserError, match="uninstall one"):
        resolve_environment_id("debate")
    assert resolve_environment_id("tictactoe") == "tictactoe-v0"


def test_unknown_names_carry_the_nearest() -> None:
    with pytest.raises(UnknownNameError, match="did you mean 'debate-v0'"):
        resolve_environment_id("debate-v7")
    with pytest.raises(UnknownNameError, match="did you mean 'tictactoe-v0'"):
        resolve_environment_id("tictaktoe")
    with pytest.raises(UnknownNameError, match="agent kind 'randon'; did you mean 'random'"):
        load_agent("randon")


def test_the_highest_version_is_taken_and_the_resolved_id_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    points = {f"nim-v{n}": "nim_game:Nim" for n in (2, 9, 10)} | {"lab/nim-v3": "nim_game:Nim"}
    write_distribution(tmp_path, "nim-game", modules={"nim_game": ""}, entry_points={ENVIRONMENTS: points})
    monkeypatch.syspath_prepend(str(tmp_path))
    assert resolve_environment_id("nim") == "nim-v10"
    assert resolve_environment_id("nim-v2") == "nim-v2"
    assert resolve_environment_id("lab/nim") == "lab/nim-v3"


@pytest.mark.parametrize("bad", ["", "x" * 300, "a\nb", "nul\0", "../../x", "/etc/passwd", ".", "CON", "dеbate-v0"])
def test_ids_that_are_no_ids(bad: str) -> None:
    with pytest.raises(UserError) as caught:
        resolve_environment_id(bad)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 400


@pytest.mark.parametrize(
    "bad", ["../../x-v0", "/etc/x-v0", "a/b/c-v1", "x-v01", "-x-v0", "d\u0435bate-v0", "x" * 90 + "-v0", "no-version"]
)
def test_an_offered_id_that_cannot_be_one_is_a_broken_line(
    bad: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_distribution(tmp_path, "odd-ids", modules={}, entry_points={ENVIRONMENTS: {bad: "selfplay_envs.nim:Nim"}})
    monkeypatch.syspath_prepend(str(tmp_path))
    (entry,) = [e for e in list_entries(ENVIRONMENTS) if e.distribution == "odd-ids"]
    assert "odd-ids 1.0 cannot be used: an id is name-vN" in entry.problem()
    with pytest.raises(UserError, match=r"is not an environment id|cannot be loaded"):
        load_environment(bad)


@pytest.mark.parametrize(
    "bad", ["", "a\nb", "x" * 300, "../x", "a/b/c", "sp ace", "nul\0", "openspiel:", ":x", "d\u0435bate"]
)
def test_ids_that_cannot_be_ids(bad: str) -> None:
    with pytest.raises(UserError, match="is not an environment id") as caught:
        resolve_environment_id(bad)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 250


def test_owners_and_versions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    points = {f"alice/nim-v{n}": "selfplay_envs.nim:Nim" for n in (1, 2, 10)} | {"bob/nim-v3": "selfplay_envs.nim:Nim"}
    write_distribution(tmp_path, "more-nim", modules={}, entry_points={ENVIRONMENTS: points})
    monkeypatch.syspath_prepend(str(tmp_path))
    assert resolve_environment_id("alice/nim") == "alice/nim-v10"
    assert resolve_environment_id("bob/nim") == "bob/nim-v3"
    assert resolve_environment_id("nim") == "nim-v0"
    with pytest.raises(UnknownNameError, match="or 'alice/nim-v10'"):
        resolve_environment_id("alice/nim-v11")
    assert load_environment("alice/nim-v2").__name__ == "Nim"


def test_an_unknown_scheme_names_the_nearest() -> None:
    with pytest.raises(UnknownNameError, match="unknown adapter 'openspeel'"):
        resolve_environment_id("openspeel:leduc_poker")
