"""PettingZoo's games through their ids: rewards of all seats to the very end, dead agents, truncation, words for numbers."""

from __future__ import annotations

import random
import sys
import types
import warnings
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import pytest

from selfplay.errors import UserError
from selfplay.registry import make_environment

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import numpy as np
    from gymnasium.spaces import Discrete
    from pettingzoo import AECEnv

    from selfplay_envs.adapters.pettingzoo import ADAPTER, PettingZooGame

CLASSIC = [
    "tictactoe_v3", "connect_four_v3", "rps_v2", "leduc_holdem_v4", "texas_holdem_v4", "texas_holdem_no_limit_v6", "hanabi_v5",
    "chess_v6", "go_v5",
]  # fmt: skip
pytestmark = pytest.mark.filterwarnings(
    "ignore"
)  # the library's own, about its observation bounds and its coming changes


@pytest.mark.parametrize("name", CLASSIC)
def test_rewards_are_the_librarys_to_the_very_end(name: str) -> None:
    """The library's own loop, with cumulative rewards read at every turn and from every dead agent, pays the same."""
    params = {"board_size": 5} if name == "go_v5" else {}
    for seed in range(1 if name in ("chess_v6", "go_v5") else 6):
        game = make_environment(f"pettingzoo:{name}", params, seed)
        rng = random.Random(seed)
        played: list[dict[str, int]] = []
        while movers := game.to_move():
            moves = {s: rng.choice(list(game.legal_moves(s) or ())) for s in movers}
            played.append({s: game.moves(s)[m] for s, m in moves.items()})  # type: ignore[attr-defined]
            game.step(moves)
        assert game.outcome().rewards == _librarys_totals(game, played), (name, seed)  # type: ignore[arg-type]
        game.close()


def _librarys_totals(game: PettingZooGame, played: list[dict[str, int]]) -> dict[str, float]:
    env = game.module.env(**game._parameters)
    env.reset(seed=game._seed)
    actions = {agent: iter([r[agent] for r in played if agent in r]) for agent in env.possible_agents}
    totals: dict[str, float] = defaultdict(float)
    for agent in env.agent_iter():
        _, reward, terminated, truncated, _ = env.last()
        totals[agent] += float(reward)
        env.step(None if terminated or truncated else next(actions[agent]))
    env.close()
    return dict(totals)


@pytest.mark.parametrize(
    ("name", "view", "move"),
    [
        ("tictactoe_v3", "1 2 3\n4 5 6\n7 8 9\nYou are X.", "4"),
        ("connect_four_v3", "1 2 3 4 5 6 7\n. . . . . . .", "7"),
        ("rps_v2", "First round.", "scissors"),
        ("chess_v6", "8 r n b q k b n r\n7 p p p p p p p p", "e2e4"),
        ("go_v5", " 1 . . . . .", "pass"),
        ("leduc_holdem_v4", "Public card: none. Your chips in the pot: ", "raise"),
        ("texas_holdem_v4", "Public cards: none. Raises per round: ", "raise"),
        ("texas_holdem_no_limit_v6", "Public cards: none. Your chips in the pot: ", "all in"),
        ("hanabi_v5", "Life tokens: ", "(Discard 0)"),
    ],
)
def test_boards_are_grids_and_moves_have_names(name: str, view: str, move: str) -> None:
    game = make_environment(f"pettingzoo:{name}", {"board_size": 5} if name == "go_v5" else {}, 0)
    (seat, *_) = game.to_move()
    assert view in game.view(seat)
    legal = list(game.legal_moves(seat) or ())
    if name == "hanabi_v5":
        assert len(legal) > 5
    else:
        assert move in legal
        assert game.parse(seat, f"I say {move}.") == move


def test_squares_are_numbered_as_they_are_shown() -> None:
    game = make_environment("pettingzoo:tictactoe_v3", {}, 0)
    game.step({"player_1": "2"})
    assert game.view("player_2") == "1 X 3\n4 5 6\n7 8 9\nYou are O."
    assert "2" not in (game.legal_moves("player_2") or ())


def test_seats_of_a_parallel_game_move_at_once() -> None:
    game = make_environment("pettingzoo:rps_v2", {"max_cycles": 2}, 0)
    assert game.to_move() == ["player_0", "player_1"]
    game.step({"player_0": "rock", "player_1": "paper"})
    assert [game.view(s) for s in game.seats] == ["The other played paper.", "The other played rock."]
    game.step({"player_0": "rock", "player_1": "rock"})
    assert game.to_move() == ()
    outcome = game.outcome()
    assert outcome.rewards == {"player_0": -1.0, "player_1": 1.0}
    assert outcome.info == {"truncated": True}


class Elimination(AECEnv[str, Any, Any]):
    """Three agents; on the first move agent_2 is thrown out and pays 1; the others play two more turns each."""

    metadata = {"name": "elimination_v0"}  # noqa: RUF012
    order: Sequence[str] = ("agent_0", "agent_1", "agent_0", "agent_1", "agent_0")

    def __init__(self) -> None:
        super().__init__()
        self.possible_agents = ["agent_0", "agent_1", "agent_2"]

    def observation_space(self, agent: str) -> Any:
        return Discrete(10)

    def action_space(self, agent: str) -> Any:
        return Discrete(2)

    def observe(self, agent: str) -> Any:
        return np.int64(self.num)

    def reset(self, seed: int | None = None, options: Any = None) -> None:
        self.agents, self.num = list(self.possible_agents), 0
        for name in ("rewards", "_cumulative_rewards"):
            setattr(self, name, dict.fromkeys(self.agents, 0.0))
        self.terminations, self.truncations = (dict.fromkeys(self.agents, False) for _ in range(2))
        self.infos = {a: {} for a in self.agents}
        self.agent_selection = "agent_0"

    def step(self, action: Any) -> None:
        if self.terminations[self.agent_selection]:
            self._was_dead_step(action)
            return
        self.num += 1
        self._cumulative_rewards[self.agent_selection] = 0
        self._clear_rewards()
        if self.num == 1:
            self.terminations["agent_2"] = True
            self.rewards.update(agent_0=1.0, agent_2=-1.0)
        if self.num == 4:
            self.terminations.update(agent_0=True, agent_1=True)
            self.rewards.update(agent_0=-2.0, agent_1=2.0)
        self.agent_selection = self.order[self.num]
        self._accumulate_rewards()
        self._deads_step_first()


class NoCycle(Elimination):
    """The same in an order that is no cycle, with the elimination in the middle of a turn of two moves."""

    order = ("agent_0", "agent_0", "agent_1", "agent_0", "agent_1")


@pytest.mark.parametrize("kind", [Elimination, NoCycle])
def test_an_eliminated_agent_is_never_asked_and_keeps_its_reward(
    kind: type[Elimination], monkeypatch: pytest.MonkeyPatch
) -> None:
    module = types.ModuleType("pettingzoo.classic.elimination_v0")
    module.env = kind  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(
        "selfplay_envs.adapters.pettingzoo._games_of", lambda family: ["elimination_v0"] if family == "classic" else []
    )
    game = ADAPTER.environment("elimination_v0")(random.Random(0))
    asked = []
    while movers := game.to_move():
        asked += movers
        game.step(dict.fromkeys(movers, "1"))
    assert tuple(asked) == kind.order[:4]
    assert game.outcome().rewards == {"agent_0": -1.0, "agent_1": 2.0, "agent_2": -1.0}
    assert game.outcome().winners == ("agent_1",)


def test_games_that_cannot_be_had() -> None:
    with pytest.raises(UserError, match="did you mean 'tictactoe_v3'"):
        make_environment("pettingzoo:tictacto_v3", {}, 0)
