"""selfplay environments as PettingZoo ones: PettingZoo's own conformance tests, and the same game underneath."""

from __future__ import annotations

import contextlib
import io
import random
import warnings
from pathlib import Path

import pytest

from selfplay.errors import UserError
from selfplay.export.pettingzoo import aec_env, parallel_env
from selfplay.registry import make_environment
from selfplay.types import derive_seed

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # the library announces at import what it will change one day
    from pettingzoo.test import api_test, parallel_api_test, parallel_seed_test, seed_test
    from pettingzoo.utils.conversions import aec_to_parallel

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


ODD_ORDER = """
from selfplay import Environment

class OddOrder(Environment):
    '''a moves twice, then b; who is out is not asked again. Whoever says y first is out.'''
    seats = ("a", "b")

    def __init__(self, rng):
        super().__init__(rng)
        self.said = []

    def to_move(self):
        order = ("a", "a", "b", "a", "a", "b")
        return (order[len(self.said)],) if len(self.said) < 6 and "y" not in self.said else ()

    def view(self, seat):
        return " ".join(self.said)

    def legal_moves(self, seat):
        return ("x", "y")

    def step(self, moves):
        self.said += moves.values()

    def outcome(self):
        return self.win("a")
"""


def test_a_turn_order_that_is_no_cycle_pairs_nobody_with_anothers_action(tmp_path: Path) -> None:
    (tmp_path / "odd.py").write_text(ODD_ORDER)
    env = parallel_env(str(tmp_path / "odd.py"))
    env.reset(seed=0)
    x, y = (env.moves.index(m) for m in "xy")
    env.step({"a": x, "b": y})
    env.step({"a": x, "b": y})
    assert env.agents == ["a", "b"]  # what b said out of turn has counted for nothing
    with pytest.raises(UserError, match="b is to move, but the actions are of a"):
        env.step({"a": y})
    for number in (2, -1):
        with pytest.raises(UserError, match=rf"action {number} of b is no move; they are 0 to 1"):
            env.step({"a": x, "b": number})
    _, rewards, ended, _, _ = env.step({"a": x, "b": y})
    assert (rewards, ended, env.agents) == ({"a": 1.0, "b": -1.0}, {"a": True, "b": True}, [])
    with pytest.raises(AssertionError, match="is_parallelizable"):
        aec_to_parallel(aec_env(str(tmp_path / "odd.py")))
