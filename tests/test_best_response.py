"""A best response by training: what it is told, what it counts, and one that is really learnt."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest
from tests.runs import Run
from tests.test_tournament_log import line

from selfplay.config import Config
from selfplay.errors import UserError
from selfplay.launch.best_response import bound_text, hunter_config, hunter_name, lower_bound, seat_bound
from selfplay.registry import describe
from selfplay.tournament.spec import Entrant

KUHN = describe("kuhn-poker-v0", {})
CHECKPOINT = Entrant(name="pro@3", player="llm", adapter="/x/adapters/pro/3")


def config_for(target: Entrant, *overrides: str) -> Config:
    profile = dict.fromkeys(KUHN.seats, target)
    return hunter_config(
        Config(), KUHN, "player_1", profile, params={}, steps=7, runs_dir=Path("r"), overrides=overrides
    )


@pytest.mark.parametrize(
    ("target", "player", "agent"),
    [
        (CHECKPOINT, "llm", "pro@3"),
        (Entrant(name="base", player="llm"), "llm", "base"),
        (Entrant(name="random", player="random"), "random", ""),
    ],
)
def test_the_target_sits_frozen_at_the_other_seat(target: Entrant, player: str, agent: str) -> None:
    config = config_for(target, "train.batch=32")
    assert (config.seats["player_0"].player, config.seats["player_0"].agent) == (player, agent)
    assert config.seats["player_1"].agent == "hunter"
    assert (config.train.steps, config.train.batch, config.runs_dir) == (7, 32, "r")


def test_the_learner_never_has_the_name_of_its_target() -> None:
    prey = [Entrant(name=n, player="llm", adapter=f"/x/adapters/{n}/1") for n in ("hunter-2", "hunter", "pro")]
    assert hunter_name(prey[1:2]) == "hunter-2"
    assert hunter_name(prey) == "hunter-3"


def test_at_a_table_of_three_both_others_are_frozen() -> None:
    env = describe("liars-dice-v0", {"players": 3})
    others = (CHECKPOINT, Entrant(name="con@9", player="llm", adapter="/x/adapters/con/9"), CHECKPOINT)
    profile = dict(zip(env.seats, others, strict=True))
    config = hunter_config(
        Config(), env, env.seats[0], profile, params={"players": 3}, steps=1, runs_dir=Path("r"), overrides=()
    )
    assert [config.seats[s].agent for s in env.seats] == ["hunter", "con@9", "pro@3"]
    assert config.env_params["players"] == 3
    profile[env.seats[1]] = Entrant(name="y/pro@3", player="llm", adapter="/y/adapters/pro/3")
    with pytest.raises(UserError, match=r"carry one name, pro@3"):
        hunter_config(
            Config(), env, env.seats[0], profile, params={"players": 3}, steps=1, runs_dir=Path("r"), overrides=()
        )


def test_a_game_of_one_is_refused() -> None:
    alone = msgspec.structs.replace(KUHN, seats=("player_0",))
    with pytest.raises(UserError, match="nobody to learn against"):
        hunter_config(
            Config(), alone, "player_0", {"player_0": CHECKPOINT}, params={}, steps=1, runs_dir=Path("r"), overrides=()
        )


def test_a_bound_is_the_mean_of_one_seat_over_deals() -> None:
    """Rewards 1, 1, -1 and 1 at the seat: mean 1/2, and 3.182 standard errors of 1/2 on either side."""
    games = [line(str(k), k, ("a", "b"), won) for k, won in enumerate((0, 0, 1, 0))]
    seat, other = list(games[0].seats)
    found = seat_bound(seat, "a", games, "folder")
    assert (found.mean, found.games) == (0.5, 4)
    assert found.half == pytest.approx(3.18245 * 0.5, rel=1e-5)
    with pytest.raises(UserError, match="came to a result"):
        seat_bound(other, "a", games, "folder")
    both = lower_bound(KUHN, "b", 7, [found, found])
    assert (both.nash_conv_at_least, both.half) == (1.0, pytest.approx(3.18245 * 0.5 * 2**0.5, rel=1e-5))
    assert "NashConv is at least 1.0000" in bound_text(both)
    assert lower_bound(KUHN, "b", 7, [found]).nash_conv_at_least is None


@pytest.mark.engine
def test_an_agent_learns_against_a_bot_and_plays_it_on_fresh_deals(tmp_path: Path) -> None:
    words = (
        "-p",
        "players=3",
        "--best-response",
        "1",
        "--at",
        "player_1",
        "--pairs",
        "4",
        "--model",
        "tiny",
        "--out",
        "B",
        "--json",
    )
    small = ("policy.engine=transformers", "train.batch=4", "rollout.concurrency=4")
    settings = tuple(word for setting in small for word in ("--set", setting))
    run = Run(tmp_path, "eval", "random", "--env", "kuhn-poker-v0", *words, *settings)
    assert run.wait(400) == 0, run.error_text()
    (seat,) = run.result()["seats"]
    assert (seat["seat"], seat["games"]) == ("player_1", 4)
    assert (tmp_path / seat["hunter"] / "version.json").is_file()
    games = [json.loads(x) for x in (tmp_path / "B/games-player_1/games.jsonl").read_text().splitlines()]
    assert [list(g["seats"].values()) for g in games] == [["random", "hunter@1", "random"]] * 4


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("--set", "train.batch=3"), "--set and --at are for the training"),
        (("--best-response", "2", "--exploitability"), "ask for one"),
        (("--best-response", "2", "--at", "player_3"), "has no seat 'player_3'"),
        (("--best-response", "2", "--set", "train.bach=3"), "train.batch"),
    ],
)
def test_mistakes_are_one_line(words: tuple[str, ...], told: str, capsys: pytest.CaptureFixture[str]) -> None:
    from selfplay.cli.main import main

    assert main(["eval", "random", "--env", "kuhn-poker-v0", *words]) == 2
    assert told in capsys.readouterr().err
