"""Matches are a pure function of seed and index; seats that cannot be are refused before anything is loaded."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from selfplay.config import load_config
from selfplay.environment import Forfeit
from selfplay.errors import ConfigError, UnknownNameError, UserError
from selfplay.league import Matchmaker
from selfplay.registry import EnvironmentSpec
from selfplay.types import Match, PolicyVersion

SPEC = EnvironmentSpec(
    id="debate-v0", source="selfplay 0", seats=("pro", "con"), zero_sum=True, reward_range=(-1.0, 1.0), max_turns=12,
    max_move_tokens=96, needs_jury=True, forfeit=Forfeit(), parameters={"rounds": 2}, doc="", rules="",
)  # fmt: skip
PLAYERS = ("llm", "random", "minimax")


def maker(*overrides: str, spec: EnvironmentSpec = SPEC) -> Matchmaker:
    return Matchmaker(spec, load_config(None, ["env=debate-v0", *overrides]), known_players=PLAYERS)


def test_every_seat_is_a_trained_agent_named_after_it() -> None:
    match = maker().match(3)
    assert [(s.seat, s.player, s.agent, s.pin, s.trained) for s in match.seats] == [
        ("pro", "llm", "pro", "turn", True), ("con", "llm", "con", "turn", True),
    ]  # fmt: skip
    assert maker().trained_agents == ("con", "pro")


def test_the_same_seed_gives_the_same_matches_and_another_seed_others() -> None:
    seeds = [maker("seed=5").match(i).seed for i in range(50)]
    assert [maker("seed=5").match(i).seed for i in range(50)] == seeds
    assert len(set(seeds)) == 50
    assert not set(seeds) & {maker("seed=6").match(i).seed for i in range(50)}


def test_a_match_is_fixed_across_machines_and_versions() -> None:
    """``printf '0\\037match\\0370' | b2sum -l 64``, halved."""
    assert maker("seed=0").match(0).seed == 8536185106512902372


def test_another_attempt_is_the_same_game_under_another_id() -> None:
    first, again = maker().match(7), maker().match(7, attempt=2)
    assert (first.episode_id, again.episode_id) == ("7.0", "7.2")
    assert msgspec.structs.replace(again, attempt=0) == first


def test_limits_come_from_the_config_and_else_from_the_environment() -> None:
    assert maker().match(0).limits.max_turns == 12
    limits = (
        maker("rollout.max_turns=4", "rollout.max_episode_tokens=99", "rollout.episode_timeout_s=5").match(0).limits
    )
    assert (limits.max_turns, limits.max_tokens, limits.time_s) == (4, 99, 5.0)


def test_parameters_reach_the_match() -> None:
    assert maker("env_params.rounds=3").match(0).env_params == {"rounds": 3}


def test_frozen_versions_base_and_bots() -> None:
    made = maker("seats.con.agent=pro@4", "jury.agent=old@1")
    con = made.match(0).assignment("con")
    assert (con.agent, con.pin, con.trained) == ("pro", 4, False)
    assert made.frozen_versions == (PolicyVersion("old", 1), PolicyVersion("pro", 4))
    assert made.trained_agents == ("pro",)
    base = maker("seats.con.agent=base").match(0).assignment("con")
    assert (base.player, base.agent, base.trained) == ("llm", "base", False)
    bot = maker("seats.con.player=random", "seats.con.options.x=1").match(0).assignment("con")
    assert (bot.player, bot.agent, bot.trained, bot.options) == ("random", "random", False, {"x": 1})


def test_a_jury_that_is_not_asked_needs_no_version() -> None:
    spec = msgspec.structs.replace(SPEC, needs_jury=False)
    assert maker("jury.agent=old@1", spec=spec).frozen_versions == ()


def test_one_agent_may_sit_at_several_seats() -> None:
    made = maker("seats.pro.agent=solo", "seats.con.agent=solo")
    assert made.trained_agents == ("solo",)
    assert [s.agent for s in made.match(0).seats] == ["solo", "solo"]


def test_interruption_by_episode_pins_by_episode() -> None:
    assert {s.pin for s in maker("sync.interrupt=episode").match(0).seats} == {"episode"}


def test_whether_a_model_is_needed() -> None:
    assert maker().needs_model


def test_matches_cross_the_wire_unchanged() -> None:
    match = maker("seats.con.agent=pro@4").match(2)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(match), type=Match) == match


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["seats.prro.agent=x"], "seats.prro: debate-v0 has no such seat; did you mean 'pro'"),
        (["seats.pro.player=random", "seats.con.agent=base"], "no seat of debate-v0 has a trained agent"),
        (["seats.pro.player=random", "seats.pro.agent=x"], "has no meaning for player 'random'"),
        (["seats.pro.agent=pro:con"], "agent name 'pro:con' is not allowed"),
        (["seats.pro.agent=pro@x"], "'pro@x' is not a policy version"),
        (["seats.pro.agent=a/b"], "agent name 'a/b' is not allowed"),
        (["seats.pro.agent=pro.v2"], "agent name 'pro.v2' is not allowed"),
        (["seats.pro.agent=débat"], "is not allowed"),
        (["seats.pro.agent=CON"], "is not allowed"),
        (["seats.pro.agent=" + "x" * 300], "is not allowed"),
        (["agents.cno.lr=1"], "agents.cno: no trained agent has that name; did you mean 'con'"),
        (["seats.pro.agent=random", "seats.con.player=random"], "is the name of a player at another seat"),
    ],
)
def test_seats_that_cannot_be_are_one_line(overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as e:
        maker(*overrides)
    assert "\n" not in str(e.value)


def test_an_unknown_player_is_named_with_the_nearest() -> None:
    with pytest.raises(UnknownNameError, match="unknown agent kind 'randm'; did you mean 'random'"):
        maker("seats.pro.player=randm")


@pytest.mark.parametrize("seat", ["Player 1", "player.1", "../x", "CON"])
def test_a_seat_whose_name_is_no_agent_name_says_what_to_set(seat: str) -> None:
    spec = msgspec.structs.replace(SPEC, seats=(seat, "con"))
    with pytest.raises(UserError, match=r"set seats\..*\.agent"):
        maker(spec=spec)
    named: Any = maker(f'seats."{seat}".agent=one', spec=spec)
    assert named.trained_agents == ("con", "one")


def test_matches_of_a_group_are_one_scenario() -> None:
    """Indices 0–2 and 3–5 have a seed each; ids stay different."""
    grouped = maker("algorithm.group=3")
    seeds = [grouped.match(i).seed for i in range(6)]
    assert len(set(seeds[:3])) == len(set(seeds[3:])) == 1
    assert seeds[0] != seeds[3]
    assert len({grouped.match(i).episode_id for i in range(6)}) == 6
