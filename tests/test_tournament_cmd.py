"""The commands as a person types them: good words, bad words, and what comes out."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest
from tests.test_adapter_store import writer
from tests.test_tournament_log import line

from selfplay.cli.eval_cmd import seat_entrants
from selfplay.cli.main import main
from selfplay.cli.match_view import pair_scores
from selfplay.cli.pgn import pgn
from selfplay.cli.runs_compare import compare, text
from selfplay.config import load_config
from selfplay.errors import ConfigError, StoreError, UserError
from selfplay.launch.entrants import read_field
from selfplay.launch.warm_start import base_model
from selfplay.ratings import RatedGame
from selfplay.store.adapters import AdapterStore
from selfplay.store.manifest import new_manifest
from selfplay.store.run_folder import RunFolder
from selfplay.tournament.gamelog import read_episode, read_lines
from selfplay.types import Episode, Match, PolicyVersion, SeatAssignment, Turn

KUHN = ("--env", "kuhn-poker-v0")
DEBATE = ("tournament", "--env", "debate-v0", "--players", "random", "base")
TWO = ("tournament", *KUHN, "--players", "random", "equilibrium")


def run(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    code = main([str(w) for w in words])
    out, err = capsys.readouterr()
    return code, out, err


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("t") / "T"
    words = ["tournament", *KUHN, "--players", "random", "equilibrium", "--pairs", "6", "--anchor", "random=0"]
    assert main([*words, "--out", str(folder)]) == 0
    return folder


def test_a_tournament_leaves_its_files_and_says_who_is_ahead(played: Path, capsys: pytest.CaptureFixture[str]) -> None:
    names = {p.name for p in played.iterdir()}
    assert {"tournament.json", "games.jsonl", "episodes", "ratings.json", "payoff.csv", "report.html"} <= names
    code, out, _ = run(capsys, "rate", played)
    assert code == 0
    assert "random = 0" in out
    assert "report.html" in out
    code, out, _ = run(capsys, "rate", played, "--json")
    assert {p["player"] for p in json.loads(out)["standings"]["ratings"]["players"]} == {"random", "equilibrium"}


def test_resume_has_nothing_to_do(played: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "tournament", "resume", played, "--json")
    assert code == 0
    assert json.loads(out)["session"]["num_new"] == 0


def test_a_game_is_replayed_with_what_each_seat_saw(played: Path, capsys: pytest.CaptureFixture[str]) -> None:
    game = read_lines(played)[2].game
    code, out, _ = run(capsys, "replay", played, game[:10], "--show-private")
    assert code == 0
    assert "Card: " in out
    assert "natural:" in out
    assert "Card: " not in run(capsys, "replay", played, "3")[1]
    assert json.loads(run(capsys, "replay", played, game, "--json")[1])["game"]["game"] == game


def test_eval_plays_a_gauntlet_and_samples_bots(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(
        capsys, "eval", "equilibrium", *KUHN, "--pairs", "3", "--opponents", "random,cfr", "--out", tmp_path / "e"
    )
    assert code == 0
    assert "equilibrium by seat, shares of games (95 %)" in out
    assert [words[:3] for words in map(str.split, out.splitlines()) if words[1:2] in (["player_0"], ["player_1"])] == [
        [opponent, seat, "3"] for opponent in ("cfr", "random") for seat in ("player_0", "player_1")
    ]
    code, out, _ = run(capsys, "eval", "random", *KUHN, "--exploitability", "--samples", "64", "--json")
    report = json.loads(out)
    assert 0.7 < report["solution"]["nash_conv"] < 1.2
    assert report["samples"] == 64


def test_parameters_reach_the_games_and_the_ratings_of_three_seats(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("tournament", "--env", "liars-dice-v0", "-p", "players=3", "--players", "random", "scripted")
    code, out, _ = run(capsys, *words, "--pairs", "3", "--out", tmp_path / "T", "--json")
    assert code == 0
    assert json.loads(out)["standings"]["counts"] == {"natural": 18}
    lines = read_lines(tmp_path / "T")
    assert {len(x.seats) for x in lines} == {3}
    assert {read_episode(tmp_path / "T", x.episode or 0).match.env_params["players"] for x in lines} == {3}
    assert "random" in run(capsys, "replay", tmp_path / "T", "1", "--show-private")[1]


def test_games_that_failed_are_said_and_the_exit_code_tells(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ("tournament", *KUHN, "-p", "players=3", "--players", "random", "equilibrium", "--pairs", "1")
    code, out, err = run(capsys, *words, "--out", tmp_path / "T", "--json")
    assert code == 1
    assert json.loads(out)["standings"]["counts"] == {"failed": 6}
    assert "6 of 6 games failed" in err
    assert "two players only" in err
    assert "Traceback" not in err


def test_eval_in_two_environments_leaves_a_folder_for_each(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ("eval", "equilibrium", *KUHN, "--env", "tictactoe-v0", "--pairs", "2", "--opponents", "random", "--out")
    code = run(capsys, *words, tmp_path / "e")[0]
    assert code == 2, "equilibrium cannot play the second, which is told before the first is played"
    assert not (tmp_path / "e").exists()
    games = (*KUHN, "--env", "leduc-poker-v0", "--pairs", "1")
    words = ("eval", "random", *games, "--opponents", "equilibrium", "--out")
    assert run(capsys, *words, tmp_path / "e")[0] == 0
    assert {p.name for p in (tmp_path / "e").iterdir()} == {"kuhn-poker-v0", "leduc-poker-v0"}


def test_a_match_decides(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ("match", "minimax", "random", "--env", "tictactoe-v0", "--sprt", "0,100", "--out", tmp_path / "m")
    code, out, _ = run(capsys, *words, "--json")
    assert code == 0
    result = json.loads(out)
    assert result["test"]["decision"] == "H1"
    assert result["outcome"] == "decided"
    assert sum(result["pentanomial"]) == result["pairs"] < 200
    log = tmp_path / "m/games.jsonl"
    log.write_bytes(b"".join(log.read_bytes().splitlines(keepends=True)[:3]))
    code, out, _ = run(capsys, "tournament", "resume", tmp_path / "m", "--json")
    assert code == 0
    assert json.loads(out)["test"]["decision"] == "H1"
    assert json.loads(out)["pairs"] < 200
    assert "biased away from 0" in run(capsys, "rate", tmp_path / "m")[1]


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("tournament", "--players", "random", "base"), "--env"),
        (("tournament", *KUHN, "--players", "random"), "at least two"),
        (("tournament", *KUHN, "--players", "random", "randm"), "did you mean 'random'"),
        (("tournament", *KUHN, "--players", "random", "random"), "named twice"),
        (("tournament", *KUHN, "--players", "random", "human"), "cannot play"),
        (("tournament", *KUHN, "--players", "random", "minimax"), "minimax cannot play"),
        (("tournament", *KUHN, "--players", "random", "pro@3"), "give its folder"),
        (("tournament", *KUHN, "--players", "random", "nowhere/*"), "matches no checkpoint"),
        (("tournament", *KUHN, "--players", "random", "runs/none"), "is no folder"),
        (("tournament", *KUHN, "--players", "random", "equilibrium", "--anchor", "x"), "PLAYER=ELO"),
        (("tournament", *KUHN, "--players", "random", "equilibrium", "--anchor", "x=1"), "does not play"),
        (("tournament", *KUHN, "--players", "random", "equilibrium", "--anchor", "random=nan"), "at most 100,000"),
        (("tournament", *KUHN, "--players", "random", "equilibrium", "--anchor", "random=-inf"), "at most 100,000"),
        ((*TWO, "--anchor", "random=1", "--anchor", "random=2"), "two values, 1 and 2"),
        ((*TWO, "--compare", "random,equilibrium"), "is for --schedule active"),
        ((*TWO, "--compare", "random", "--schedule", "active"), "name two players"),
        ((*TWO, "--compare", "random,random", "--schedule", "active"), "name two players"),
        ((*TWO, "--compare", "random,x", "--schedule", "active"), "does not play"),
        ((*TWO, "--pairs", "0"), "--pairs"),
        (("tournament", *KUHN, "--players", "random", "equilibrium", "--budget-time", "-3"), "write seconds"),
        (("tournament", *KUHN, "--players", "random", "equilibrium:alpha=7"), "between 0 and 1/3"),
        (("tournament", "--env", "kuhn-pokr", "--players", "random", "equilibrium"), "kuhn-poker"),
        (("tournament", "resume"), "name one folder"),
        (("tournament", "resume", "/nowhere"), "not a tournament"),
        (("rate", "/nowhere"), "not a tournament"),
        (("replay", "/nowhere", "1"), "not a tournament"),
        (("match", "random", "equilibrium", *KUHN, "--sprt", "5"), "two numbers"),
        (("match", "random", "equilibrium", *KUHN, "--sprt", "5,1"), "elo0 < elo1"),
        (("match", "random", "equilibrium", *KUHN, "-p", "players=3"), "needs two"),
        (("eval", "random", "--env", "debate-v0", "--exploitability"), "jury"),
        ((*DEBATE, "--jury", "nobody"), "'nobody' names none"),
        ((*DEBATE, "--jury", "api:base=http://127.0.0.1:1/v1"), "no model name"),
        ((*DEBATE, "--jury", "api:model=m:base=ftp://a"), "not of the form https://host/v1"),
        ((*DEBATE, "--jury", "api:modle=m"), "modle"),
        (("eval", "random", "equilibrium", *KUHN), "one checkpoint"),
        ((*TWO, "--model", "tiny"), "none of random, equilibrium is a model"),
        (("match", "random", "equilibrium", *KUHN, "--model", "tiny"), "none of random, equilibrium is a model"),
        (("eval", "equilibrium", *KUHN, "--opponents", "random", "--model", "tiny"), "is a model"),
    ],
)
def test_mistakes_are_one_line_and_exit_2(
    words: tuple[str, ...], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, err = run(capsys, *words)
    assert code == 2
    assert told in err
    assert len(err.strip().splitlines()) == 1
    assert out == ""


def test_games_that_are_not_there(played: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "no game" in run(capsys, "replay", played, "zz")[2]
    assert "give more" in run(capsys, "replay", played, "")[2]


def test_one_player_sits_everywhere_and_several_need_a_seat_each() -> None:
    field = read_field(["random"], model=None)
    assert [e.name for e in seat_entrants(("a", "b"), field)] == ["random", "random"]
    with pytest.raises(UserError, match="name one each"):
        seat_entrants(("a", "b"), read_field(["random", "equilibrium"], model=None))


def test_only_whole_pairs_count_in_a_match() -> None:
    lines = [line("1", 0, ("a", "b"), 0), line("2", 0, ("b", "a"), 1), line("3", 1, ("a", "b"), 0)]
    scores = pair_scores({x.game: x for x in lines}, "a")
    assert scores.counts == (0, 0, 0, 0, 1)
    assert RatedGame(players=("a", "a"), places=(0, 1), cluster="x").is_mirror


def test_runs_are_compared_by_step() -> None:
    one = [{"step": k, "win": 0.5 + 0.01 * (k % 2), "loss": 1.0, "time": 5.0} for k in range(40)]
    two = [{"step": k, "win": 0.6 + 0.01 * (k % 3), "loss": 1.0} for k in range(10, 50)]
    (found,) = compare(one, two)
    assert (found.name, found.steps) == ("win", 30)
    assert found.difference == pytest.approx(0.105, abs=1e-3)
    assert found.clear
    assert compare(one, two[-5:]) == []
    assert compare(one, two, first=38)[0].half is None
    assert "* win" in text({"one": "a", "two": "b"}, ["train.lr"], [found])


def test_chess_as_pgn(played: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "no chess" in run(capsys, "replay", played, "1", "--pgn")[2]
    moves = ("e2e4", "e7e5", "Qh5", "Nc6", "f1c4", "Nf6", "h5f7")
    seats = ("white", "black")
    turns = tuple(Turn(seat=seats[k % 2], agent="x", round=k, text=m, move=m) for k, m in enumerate(moves))
    assigned = tuple(SeatAssignment(seat=s, player="random", agent="random") for s in seats)
    episode = Episode(
        match=Match(index=1, env="my-chess-v0", seed=1, seats=assigned), env_source="s", turns=turns,
        rewards={"white": 1.0, "black": -1.0}, winners=("white",), ended="natural", reason="mate",
    )  # fmt: skip
    shown = msgspec.structs.replace(line("1", 0, ("a", "b")), seats={"white": "a", "black": "b"}, winners=("white",))
    text = pgn(shown, episode)
    assert "1. e4 e5 2. Qh5 Nc6 3. Bc4 Nf6 4. Qxf7# 1-0" in text
    assert '[White "a"]' in text
    with pytest.raises(UserError, match="neither UCI nor SAN"):
        pgn(shown, msgspec.structs.replace(episode, turns=(msgspec.structs.replace(turns[0], move="jump"),)))


def test_a_warm_started_run_is_served_on_the_base_that_it_was_trained_on(tmp_path: Path) -> None:
    config = load_config(None, ["env=kuhn-poker-v0", "model=tiny", "warm_start.steps=3"])
    manifest = new_manifest(config, name="w", env_source="s")
    with RunFolder.create(tmp_path, "w", config, manifest) as run:
        with pytest.raises(StoreError, match=r"warm_start is missing: the adapters of this run belong on the base"):
            base_model(run)
        (run.path / "warm_start").mkdir()
        (run.path / "warm_start/config.json").write_text("{}")
        assert base_model(run) == str(run.path / "warm_start")


def test_a_checkpoint_is_asked_as_in_its_run(tmp_path: Path) -> None:
    """An adapter that learnt from short chats plays short chats in a tournament, too."""
    short = ["seats.player_0.options.history=last", "seats.player_1.agent=other", "seats.player_1.options.legal=never"]
    both = ["seats.player_0.agent=other", *short[:1], "seats.player_1.agent=other"]
    for name, overrides in (("short", short), ("both", both)):
        config = load_config(None, ["env=kuhn-poker-v0", "model=tiny", *overrides])
        with RunFolder.create(tmp_path, name, config, new_manifest(config, name=name, env_source="s")) as made:
            for agent in ("player_0", "other"):
                AdapterStore(made.adapters).publish(PolicyVersion(agent, 1), writer(), parent=None)
    field = read_field([str(tmp_path / "short")], model=None)
    assert {e.name: e.options for e in field.entrants} == {
        "player_0@1": {"history": "last"},
        "other@1": {"legal": "never"},
    }
    with pytest.raises(ConfigError, match="other plays player_0, player_1 of its run with different options"):
        read_field([str(tmp_path / "both/adapters/other")], model=None)


@pytest.mark.parametrize("words", [("tournament", "--players"), ("match",), ("eval", "--opponents", "random")])
def test_a_mistake_seen_after_the_folder_was_made_leaves_no_folder(
    words: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The name is free for the next attempt, which may be the same command with its mistake mended."""
    players = ("base",) if words[0] == "eval" else ("base", "random")
    folder = tmp_path / "T"
    code, _, err = run(capsys, *words, *players, *KUHN, "--model", tmp_path / "nowhere", "--out", folder)
    assert code == 2
    assert "there is no folder" in err
    assert not folder.exists()
