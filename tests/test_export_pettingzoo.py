"""selfplay environments as PettingZoo ones: PettingZoo's own conformance tests, and the same game underneath."""

from __future__ import annotations

import contextlib
import io
import random
import warnings

import pytest

from selfplay.errors import UserError
from selfplay.export.pettingzoo import aec_env, parallel_env
from selfplay.registry import make_environment
from selfplay.types import derive_seed

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # the library announces at import what it will change one day
    from pettingzoo.test import api_test, parallel_api_test, parallel_seed_test, seed_test

GAMES = ["kuhn-poker-v0", "leduc-poker-v0", "prisoners-dilemma-v0"]
ODD_NAMES = ["tictactoe-v0", "nim-v0"]
"""Their seats are not called player_0 and player_1, which PettingZoo would rather have."""


@pytest.mark.parametrize("env_id", GAMES + ODD_NAMES)
def test_pettingzoos_own_tests_pass(env_id: str) -> None:
    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
        if env_id in ODD_NAMES:
            warnings.filterwarnings("ignore", message="We recommend agents to be named")
        api_test(aec_env(env_id), num_cycles=200)
        seed_test(lambda: aec_env(env_id), num_cycles=50)
        parallel_api_test(parallel_env(env_id), num_cycles=200)
        parallel_seed_test(lambda: parallel_env(env_id), num_cycles=50)


@pytest.mark.parametrize("env_id", GAMES)
def test_an_aec_game_is_the_same_game(env_id: str) -> None:
    env, rng = aec_env(env_id), random.Random(0)
    for seed in range(20):
        env.reset(seed=seed)
        game = make_environment(env_id, {}, derive_seed(seed))
        totals = dict.fromkeys(env.possible_agents, 0.0)
        pending: dict[str, str] = {}
        for agent in env.agent_iter():
            _, reward, ended, cut, info = env.last()
            totals[agent] += reward
            if ended or cut:
                env.step(None)
                continue
            assert agent in game.to_move()
            assert info["legal_moves"] == list(game.legal_moves(agent) or ())
            assert game.view(agent) in info["text"]
            assert [m for m, on in zip(env.moves, info["action_mask"], strict=True) if on] == sorted(
                info["legal_moves"]
            )
            pending[agent] = rng.choice(info["legal_moves"])
            env.step(env.moves.index(pending[agent]))
            if len(pending) == len(game.to_move()):
                game.step(pending)
                pending = {}
        assert totals == game.outcome().rewards
    env.close()


def test_an_illegal_action_forfeits() -> None:
    env = aec_env("tictactoe-v0")
    env.reset(seed=0)
    env.step(env.moves.index("5"))
    env.step(env.moves.index("5"))
    assert env.terminations == {"x": True, "o": True}
    assert env.rewards == {"x": 1.0, "o": -1.0}


def test_observations_are_the_text() -> None:
    env = aec_env("kuhn-poker-v0")
    env.reset(seed=1)
    data = bytes(env.observe(env.agent_selection)).rstrip(b"\0").decode()
    assert data == env.infos[env.agent_selection]["text"]
    assert "Card: " in data
    small = aec_env("kuhn-poker-v0", max_text_bytes=10)
    small.reset(seed=1)
    with pytest.raises(UserError, match="but observations have 10: give max_text_bytes="):
        small.observe("player_0")


def test_what_cannot_be_exported() -> None:
    with pytest.raises(UserError, match="debate-v0: any text is a move there"):
        aec_env("debate-v0")
    env = aec_env("nim-v0", moves=["7"])
    with pytest.raises(UserError, match="none of the legal moves"):
        env.reset(seed=0)
    with pytest.raises(UserError, match=r"call reset\(\) before step\(\)"):
        parallel_env("prisoners-dilemma-v0").step({"player_0": 0, "player_1": 0})
