"""Warm start: what scripted players show is what a model would be asked and answer, and a model learns it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import click.testing
import msgspec
import pytest

from selfplay.cli.main import cli, main
from selfplay.config import load_config
from selfplay.errors import TrainerError, UserError
from selfplay.launch.demonstrate import Teacher, demonstrations
from selfplay.launch.warm_start import WarmStartJob, _check_length, warm_start
from selfplay.models import resolve_model
from selfplay.policy.chat import HfChat
from selfplay.process.guard import ORPHANED_EXIT_CODE
from selfplay.registry import describe
from selfplay.scoring import episode_segments
from selfplay.training import sft

KUHN = "kuhn-poker-v0"


def settings(*overrides: str) -> Any:
    return load_config(None, [f"env={KUHN}", "model=tiny", "warm_start.steps=30", "warm_start.episodes=40", *overrides])


def test_demonstrations_are_what_a_model_would_be_asked_and_would_say(tiny_model: Path) -> None:
    chat = HfChat(str(tiny_model))
    episodes = demonstrations(describe(KUHN, {}), {}, teacher=Teacher("random"), num=20, seed=1, chat=chat)
    again = demonstrations(describe(KUHN, {}), {}, teacher=Teacher("random"), num=20, seed=1, chat=chat)
    assert [[(t.prompt_ids, t.sampled_ids) for t in e.turns] for e in again] == [
        [(t.prompt_ids, t.sampled_ids) for t in e.turns] for e in episodes
    ]
    assert all(t.legal for e in episodes for t in e.turns)
    for turn in (t for e in episodes for t in e.turns):
        assert chat.decode(turn.sampled_ids) == turn.move
        assert turn.sampled_ids[-1] in chat.stop_ids
    longest = next(
        s for e in episodes for s in episode_segments(e, {"player_0": 1.0, "player_1": 1.0}) if s.mask.count(1) > 6
    )
    text = chat.decode(longest.ids)
    assert text.count("Card:") == 2
    assert "History: pass, bet." in text


def test_the_model_is_asked_as_in_play_and_learns_from_the_player_only(tiny_model: Path) -> None:
    """With short chats no context holds two cards; against an opponent half of the moves of each seat are the player's."""
    spec, chat = describe("tictactoe-v0", {}), HfChat(str(tiny_model))
    options = {seat: {"history": "last"} for seat in spec.seats}
    episodes = demonstrations(
        spec, {}, teacher=Teacher("minimax"), num=4, seed=1, chat=chat, opponent="random", options=options
    )
    assert [[s.trained for s in e.match.seats] for e in episodes] == [[True, False], [False, True]] * 2
    for episode in episodes:
        mine = next(s.seat for s in episode.match.seats if s.trained)
        segments = episode_segments(episode, {mine: 1.0})
        assert len(segments) == sum(t.seat == mine for t in episode.turns)
        assert all(chat.decode(s.ids).count("Your square:") == 1 for s in segments)


def test_the_teacher_has_its_options(tiny_model: Path) -> None:
    """Without ties all games against one line of play are the same game."""
    spec, chat = describe("tictactoe-v0", {}), HfChat(str(tiny_model))
    teacher = Teacher("minimax", {"ties": "first"})
    games = demonstrations(spec, {}, teacher=teacher, num=3, seed=1, chat=chat)
    assert [t.move for t in games[0].turns] == ["1", "5", "2", "3", "7", "4", "6", "8", "9"]
    assert len({tuple(t.move for t in e.turns) for e in games}) == 1


def test_an_answer_that_play_would_cut_is_not_learnt(tiny_model: Path) -> None:
    chat = HfChat(str(tiny_model))
    episodes = demonstrations(describe(KUHN, {}), {}, teacher=Teacher("random"), num=3, seed=1, chat=chat)
    _check_length(episodes, 4)
    with pytest.raises(UserError, match=r"'pass' has 5 tokens .* play allows 3: set rollout.max_tokens=5"):
        _check_length(episodes, 3)


def test_players_that_show_nothing_are_refused(tiny_model: Path) -> None:
    chat = HfChat(str(tiny_model))
    with pytest.raises(UserError, match="no model is served"):
        demonstrations(describe(KUHN, {}), {}, teacher=Teacher("llm"), num=1, seed=1, chat=chat)


def test_a_model_learns_the_format_and_is_a_model(tmp_path: Path) -> None:
    said: list[str] = []
    config, base = settings(), resolve_model("tiny")
    model, record = warm_start(config, base, tmp_path / "warm", said.append)
    assert record["first_loss"] > 3 > 1 > record["last_loss"]  # type: ignore[operator]
    assert (record["player"], record["steps"], record["env"]) == ("random", 30, KUHN)
    assert model.digest != base.digest
    assert model.default_dtype == base.default_dtype
    assert HfChat(str(model.path)).stop_ids == HfChat(str(base.path)).stop_ids
    assert said
    assert warm_start(config, base, tmp_path / "warm", said.append) == (model, record), "made once"


def test_the_child_ends_with_its_parent(tiny_model: Path, tmp_path: Path) -> None:
    """Its standard input is the lifeline: closed, it leaves long before it would be done."""
    config = settings("warm_start.steps=1000000")
    job = WarmStartJob(config=config, model="tiny", digest="", source=str(tiny_model), target=str(tmp_path / "x"))
    command = [sys.executable, "-m", "selfplay.launch.warm_start", msgspec.json.encode(job).decode()]
    orphan = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, timeout=300, check=False)
    assert orphan.returncode == ORPHANED_EXIT_CODE


def test_nothing_to_learn_from_is_an_error(tiny_model: Path, tmp_path: Path) -> None:
    with pytest.raises(TrainerError, match="nothing to learn from"):
        sft.fit(
            tiny_model, tmp_path / "x", [], settings().warm_start, seed=0, max_tokens=64, say=print, complete=print
        )  # fmt: skip


def test_the_command_writes_a_folder_and_says_how_to_go_on(tmp_path: Path) -> None:
    out = tmp_path / "kuhn"
    options = ["warm_start.steps=3", "warm_start.episodes=5", "--json"]
    result = click.testing.CliRunner().invoke(cli, ["sft", "--env", KUHN, "model=tiny", "--out", str(out), *options])
    assert result.exit_code == 0, result.output
    told = json.loads(result.stdout)
    assert (told["model"], told["steps"]) == (str(out), 3)
    assert (out / "model.safetensors").is_file()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--env", KUHN, "model=tiny", "--out", "{here}"], "exists: name a folder that does not"),
        (["--env", KUHN, "model=tiny", "--out", "{here}/no/such"], "there is no folder"),
        (["--env", KUHN, "model=tiny", "--out", "/proc/x"], "--out /proc/x cannot be written: No such file"),
        (["--env", KUHN, "model=tiny", "--out", "{here}/" + "x" * 250], "cannot be written: File name too long"),
        (
            ["--env", KUHN, "model=tiny", "--out", "{here}/x", "warm_start.player=human"],
            "warm_start.player: 'human' is",
        ),
        (
            ["--env", KUHN, "model=tiny", "--out", "{here}/x", "warm_start.player=llm"],
            "warm_start.player: 'llm' is not",
        ),
        (
            ["--env", KUHN, "model=tiny", "--out", "{here}/x", "warm_start.opponent=human"],
            "warm_start.opponent: 'human'",
        ),
        (["--env", KUHN, "model=tiny", "--out", "{here}/x", "warm_start.steps=0"], "nothing to do"),
        (["--env", KUHN, "model=tiny", "--out", "{here}/x", "warm_start.player=randm"], "did you mean 'random'"),
        (["--env", KUHN, "model=tiny", "--out", "{here}/x", "warm_start.opponent=randm"], "did you mean 'random'"),
        (["--env", KUHN, "model=tiny", "--out", "{here}/x", "warm_start.player=minimax"], "minimax cannot play"),
        (
            ["--env", KUHN, "model=tiny", "--out", "{here}/x", "warm_start.options.ties=first"],
            "has no parameter 'ties'",
        ),
        (["--env", KUHN, "model=tiny", "--out", "{here}/x", "warm_start.stps=3"], "did you mean 'warm_start.steps'"),
        (["model=tiny", "--out", "{here}/x"], "env is empty"),
        (["--env", "kuhn-poker-v9", "model=tiny", "--out", "{here}/x"], "did you mean 'kuhn-poker-v0'"),
    ],
)
def test_mistakes_are_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], words: str
) -> None:
    assert main(["sft", *(a.replace("{here}", str(tmp_path)) for a in arguments)]) == 2
    error = capsys.readouterr().err
    assert words in error
    assert len(error.strip().splitlines()) == 1
