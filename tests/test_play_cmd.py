"""``selfplay play`` and ``selfplay env`` from the command line, in process and as real processes."""

from __future__ import annotations

import json
import subprocess
import sys
import types
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from tests.patience import PATIENCE_S

from selfplay.agent import PolicyClient
from selfplay.cli.main import main
from selfplay.cli.play_cmd import parse_player
from selfplay.registry import ENVIRONMENTS
from selfplay.types import PolicyVersion
from test_agents_llm import FakePolicy
from toy_games import write_distribution

NIM = str(Path(__file__).with_name("sticks.py"))
Result = tuple[int, str, str]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Callable[..., Result]:
    def command(*argv: str) -> Result:
        code = main(argv)
        out = capsys.readouterr()
        return code, out.out, out.err

    return command


def test_a_game_between_bots(run: Callable[..., Result]) -> None:
    code, out, err = run("play", "tictactoe-v0", "--players", "minimax,random", "--seed", "3")
    assert (code, err) == (0, "")
    assert "x: minimax, o: random" in out
    assert out.count("result: ") == 1
    assert run("play", "tictactoe-v0", "--players", "minimax,random", "--seed", "3")[1] == out
    assert run("play", "tictactoe-v0", "--players", "minimax,random", "--seed", "4")[1] != out


def test_json_is_one_object_and_nothing_else(run: Callable[..., Result]) -> None:
    code, out, err = run("play", "kuhn-poker-v0", "--games", "3", "--json")
    assert (code, err) == (0, "")
    body = json.loads(out)
    assert body["env"] == "kuhn-poker-v0"
    assert [e["match"]["index"] for e in body["episodes"]] == [0, 1, 2]
    assert len({e["match"]["seed"] for e in body["episodes"]}) == 3


def test_an_environment_that_prints_leaves_json_parseable(run: Callable[..., Result], tmp_path: Path) -> None:
    path = tmp_path / "chatty.py"
    source = Path(NIM).read_text("utf-8").replace("self.turn += 1", "self.turn += 1; print('noise\\n' * 10_000)")
    path.write_text(source.replace("class Nim", "print('import noise')\n\n\nclass Nim"), "utf-8")
    code, out, err = run("play", str(path), "--json")
    assert (code, err) == (0, "")
    (episode,) = json.loads(out)["episodes"]
    assert episode["info"]["printed_chars"] > 10_000


def test_a_bare_file_and_the_unversioned_id(run: Callable[..., Result]) -> None:
    code, out, _ = run("play", NIM, "-p", "heap=4")
    assert code == 0
    assert "first: random, second: random" in out
    code, _, err = run("play", "tictactoe")
    assert code == 0
    assert err == "environment tictactoe is tictactoe-v0\n"


def test_several_games_end_with_a_summary(run: Callable[..., Result]) -> None:
    _, out, _ = run("play", "tictactoe-v0", "--players", "minimax,random", "--games", "4")
    assert "mean reward" in out
    assert "0/4" in out


def test_private_views_only_on_request(run: Callable[..., Result]) -> None:
    public = run("play", "kuhn-poker-v0", "--seed", "1")[1]
    private = run("play", "kuhn-poker-v0", "--seed", "1", "--show-private")[1]
    assert "Card: " not in public
    assert "Card: " in private


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["tictaktoe-v0"], "unknown environment 'tictaktoe-v0'; did you mean 'tictactoe-v0'"),
        (["tictactoe-v0", "--players", "randm"], "unknown player 'randm'; did you mean 'random'?"),
        (["tictactoe-v0", "--players", "random,random,random"], "3 players for 2 seats (x, o)"),
        (["tictactoe-v0", "--players", "random:depth=3"], "agent kind random has no parameter 'depth'"),
        (["kuhn-poker-v0", "--players", "minimax"], "minimax cannot play 'kuhn-poker-v0'"),
        (["kuhn-poker-v0", "-p", "plaers=3"], "no parameter 'plaers'; did you mean 'players'?"),
        (["kuhn-poker-v0", "-p", "players=x"], "'players' is 'x' (str), expected int"),
        (["kuhn-poker-v0", "-p", "players"], "'players' is not key=value"),
        (["debate-v0"], "debate-v0 needs a jury: add --jury base"),
        (["debate-v0", "--jury", "judge"], "unknown player 'judge'"),
        (["debate-v0", "--jury", "api"], "no API address"),
        (["debate-v0", "--jury", "even:x=1"], "jury even has no parameter 'x'"),
        (["tictactoe-v0", "--players", "pro@3"], "pro@3 is a version of a run: name it with --run RUN"),
        (["tictactoe-v0", "--players", "pro@x"], "'pro@x' is not a policy version"),
        (["tictactoe-v0", "--players", "base:history=some"], "history is 'some'"),
        (["tictactoe-v0", "--model", "tiny"], "no player is a model"),
        (["./no_such_game.py"], "there is no environment file"),
        (["tictactoe-v0", "--seed", "x"], "'x' is not a valid integer"),
    ],
)
def test_mistakes_are_one_line_and_exit_2(run: Callable[..., Result], argv: Sequence[str], message: str) -> None:
    code, out, err = run("play", *argv)
    assert (code, out) == (2, "")
    assert message in err
    assert err.count("\n") == 1


def test_an_environments_bug_shows_its_traceback_and_exits_1(run: Callable[..., Result], tmp_path: Path) -> None:
    path = tmp_path / "buggy.py"
    path.write_text(Path(NIM).read_text("utf-8").replace("self.turn += 1", "raise ValueError('bad card 53')"), "utf-8")
    code, _, err = run("play", str(path))
    assert code == 1
    assert "bad card 53" in err.splitlines()[-1]
    assert f'File "{path}"' in err


def test_player_texts() -> None:
    kinds = ["random", "api"]
    assert parse_player("pro@3", kinds).pin == 3
    assert parse_player("base", kinds).player == "llm"
    api = parse_player("api:model=m:base=http://h.example:8000/v1:retries=2", kinds)
    assert api.options == {"model": "m", "base": "http://h.example:8000/v1", "retries": 2}


# ── models, through the seam ──────────────────────────────────────────────────────────────────────


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """A launcher in place of the real one: records what is asked for and serves a fake policy."""
    seen: dict[str, Any] = {"closed": 0}

    @asynccontextmanager
    async def open_policy(**asked: Any) -> AsyncIterator[PolicyClient]:
        seen.update(asked)
        asked["say"]("starting")
        seen["policy"] = FakePolicy("bet")
        try:
            yield seen["policy"]
        finally:
            seen["closed"] += 1

    module = types.ModuleType("selfplay.launch.serve")
    module.open_policy = open_policy  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "selfplay.launch.serve", module)
    return seen


def test_base_plays_with_the_default_model(run: Callable[..., Result], served: dict[str, Any]) -> None:
    code, out, err = run("play", "kuhn-poker-v0", "--players", "base,random", "--temperature", "0.5")
    assert code == 0
    assert (served["model"], served["run"], served["versions"], served["closed"]) == ("smollm2-135m", None, (), 1)
    call = served["policy"].calls[0]
    assert (call["sampling"].temperature, call["sampling"].max_tokens) == (0.5, 8)  # what kuhn-poker declares
    assert call["assignment"].agent == "base"
    assert "player_0: base" in out
    assert err == "starting\n"


def test_versions_of_a_run_are_asked_for_once(run: Callable[..., Result], served: dict[str, Any]) -> None:
    code, *_ = run("play", "debate-v0", "--run", "runs/x", "--players", "pro@3,con@0", "--jury", "pro@3")
    assert code == 0
    assert served["versions"] == (PolicyVersion("con", 0), PolicyVersion("pro", 3))
    assert (served["model"], served["run"]) == (None, "runs/x")
    asked = [c for c in served["policy"].calls if "question" in c]
    assert [(c["agent"], c["pin"]) for c in asked] == [("pro", 3), ("pro", 3)]


def test_a_model_player_brings_the_base_jury(run: Callable[..., Result], served: dict[str, Any]) -> None:
    code, out, _ = run("play", "debate-v0", "--players", "base,random")
    assert code == 0
    assert [c["agent"] for c in served["policy"].calls if "question" in c] == ["base", "base"]
    assert "result: draw" in out


def test_bots_start_no_model(run: Callable[..., Result], served: dict[str, Any]) -> None:
    assert run("play", "debate-v0", "--jury", "even")[0] == 0
    assert "policy" not in served


# ── env ───────────────────────────────────────────────────────────────────────────────────────────


def test_env_list(run: Callable[..., Result]) -> None:
    code, out, err = run("env", "list")
    assert (code, err) == (0, "")
    assert any(line.startswith("debate-v0") and "selfplay" in line for line in out.splitlines())


def test_broken_plugins_are_lines_of_the_list(
    run: Callable[..., Result], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    points = {
        ENVIRONMENTS: {
            "gone-v0": "deleted_folder:Game",
            "endless-v0": "endless_game:Game",
            "tictactoe-v0": "endless_game:T",
        }
    }
    write_distribution(tmp_path, "bad-plugin", modules={"endless_game": "while True: pass\n"}, entry_points=points)
    monkeypatch.syspath_prepend(str(tmp_path))
    code, out, _ = run("env", "list")
    lines = {line.split()[0]: line for line in out.splitlines()}
    assert code == 0
    assert "'deleted_folder' of bad-plugin 1.0 is missing" in lines["gone-v0"]
    assert "offered by bad-plugin 1.0 and by selfplay" in lines["tictactoe-v0"]
    assert "broken" not in lines["endless-v0"] + lines["debate-v0"]
    rows = {r["id"]: r for r in json.loads(run("env", "list", "--json")[1])["environments"]}
    assert rows["gone-v0"]["problem"]
    assert rows["debate-v0"]["problem"] == ""


def test_env_info(run: Callable[..., Result]) -> None:
    code, out, _ = run("env", "info", "kuhn-poker", "-p", "players=3")
    assert code == 0
    assert "player_0, player_1, player_2" in out
    assert "-2 to 4, zero-sum" in out
    spec = json.loads(run("env", "info", NIM, "--json")[1])
    assert spec["parameters"] == {"heap": 21}
    code, out, err = run("env", "info", "kuhn-pokr-v0")
    assert (code, out) == (2, "")
    assert "did you mean 'kuhn-poker-v0'" in err


# ── what is imported ──────────────────────────────────────────────────────────────────────────────

HEAVY = ("torch", "transformers", "vllm", "ray", "numpy", "peft", "safetensors")


@pytest.mark.parametrize(
    "code",
    [
        "import selfplay.play, selfplay.registry, selfplay_envs.debate, selfplay_envs.kuhn_poker, selfplay_envs.tictactoe",
        "import selfplay_agents.llm, selfplay_agents.api, selfplay_agents.human, selfplay_agents.minimax",
        "from selfplay.cli.main import main; main(['env', 'list']); main(['play', 'tictactoe-v0'])",
        "from selfplay.cli.main import main; main(['play', '--help']); main(['env', 'info', 'debate-v0'])",
    ],
)
def test_nothing_heavy_is_imported(code: str) -> None:
    check = f"{code}\nimport sys; bad = [m for m in {HEAVY} if m in sys.modules]; assert not bad, bad"
    done = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.returncode == 0, done.stderr


def test_help_imports_no_game() -> None:
    code = "from selfplay.cli.main import main; main(['play', '--help']); import sys; assert 'selfplay.play' not in sys.modules"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=PATIENCE_S).returncode == 0
