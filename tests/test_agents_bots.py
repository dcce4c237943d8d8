"""Bots and the person at the terminal."""

from __future__ import annotations

import asyncio
import random
import subprocess
import sys
import threading
from collections import Counter
from typing import Any

import pytest
from tests.patience import PATIENCE_S

from selfplay.agent import Answer, Decision, Player, PlayerContext, Sampling
from selfplay.errors import ConfigError, UserError
from selfplay.play import play, sit_down
from selfplay.registry import make_environment
from selfplay.types import Episode, Match, SeatAssignment
from selfplay_agents.equilibrium import EquilibriumPlayer
from selfplay_agents.human import HumanPlayer
from selfplay_agents.minimax import MinimaxPlayer
from selfplay_agents.random_player import RandomPlayer


def context(env_id: str = "tictactoe-v0", seed: int = 0, **options: Any) -> PlayerContext:
    return PlayerContext(
        assignment=SeatAssignment(seat="x", player="bot", agent="bot", options=options), episode_id="0.0",
        rng=random.Random(seed), policy=None, sampling=Sampling(), env_id=env_id, options=options,
    )  # fmt: skip


def decision(view: str, legal: tuple[str, ...] | None = None, rules: str = "", complaint: str = "") -> Decision:
    return Decision(seat="x", round=0, rules=rules, view=view, legal_moves=legal, complaint=complaint)


def ask(player: Player, asked: Decision) -> Answer:
    return asyncio.run(player.decide(asked))


def game(env_id: str, seats: dict[str, str], seed: int, **params: Any) -> Episode:
    assigned = tuple(SeatAssignment(seat=s, player=p, agent=p) for s, p in seats.items())
    match = Match(index=0, env=env_id, env_params=params, seed=seed, seats=assigned)
    return asyncio.run(
        play(env_id, make_environment(env_id, params, seed), sit_down(match, None, Sampling()), match, env_source="t")
    )


# ── random ────────────────────────────────────────────────────────────────────────────────────────


def test_random_is_uniform_over_legal_moves_and_seeded() -> None:
    player = RandomPlayer(context())
    counts = Counter(ask(player, decision("v", ("1", "2", "3"))).text for _ in range(600))
    assert set(counts) == {"1", "2", "3"}
    assert min(counts.values()) > 140
    texts = [[ask(RandomPlayer(context(seed=s)), decision("v")).text for s in range(8)] for _ in range(2)]
    assert texts[0] == texts[1]
    assert len(set(texts[0])) > 3
    assert all(any(c.isalpha() for c in t) for t in texts[0])


def test_a_habit_is_one_move_per_view_whoever_plays() -> None:
    legal = ("1", "2", "3")
    always = [
        {ask(RandomPlayer(context(seed=seed, habit=1.0)), decision(view, legal)).text for seed in range(5)}
        for view in "abcdefgh"
    ]
    assert all(len(moves) == 1 for moves in always)
    assert len(set.union(*always)) == 3
    counts = Counter(ask(RandomPlayer(context(seed=seed, habit=0.5)), decision("a", legal)).text for seed in range(600))
    (usual,) = always[0]
    assert 340 < counts[usual] < 460  # two thirds
    assert min(counts.values()) > 60


@pytest.mark.parametrize("habit", [-0.1, 1.5])
def test_a_habit_is_a_probability(habit: float) -> None:
    with pytest.raises(ConfigError, match="it must be between 0 and 1"):
        RandomPlayer(context(habit=habit))


def test_the_same_match_gives_the_same_game() -> None:
    def moves(seed: int) -> list[str | None]:
        return [t.move for t in game("tictactoe-v0", {"x": "random", "o": "random"}, seed).turns]

    assert moves(3) == moves(3)
    assert len({tuple(moves(s)) for s in range(5)}) > 1


def test_bots_take_no_unknown_options() -> None:
    for kind in (RandomPlayer, MinimaxPlayer, HumanPlayer):
        with pytest.raises(ConfigError, match="has no parameter 'depth'"):
            kind(context(depth=3))


# ── minimax ───────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("board", "best"),
    [("X X 3\nO O 6\n7 8 9", {"3"}), ("X 2 3\n4 5 6\n7 8 9", {"5"}), ("O X 3\n4 X 6\nO 8 9", {"4", "8"})],
)
def test_minimax_plays_only_best_moves(board: str, best: set[str]) -> None:
    played = {
        ask(MinimaxPlayer(context(seed=s)), decision(f"{board}\nYou are X. Your square:")).text for s in range(30)
    }
    assert played <= best


def test_minimax_without_ties_always_plays_the_first_of_the_best() -> None:
    view = decision("O X 3\n4 X 6\nO 8 9\nYou are X. Your square:")
    assert {ask(MinimaxPlayer(context(seed=s, ties="first")), view).text for s in range(9)} == {"4"}
    with pytest.raises(ConfigError, match="ties is 'last'; it must be random or first"):
        MinimaxPlayer(context(ties="last"))


def test_minimax_refuses_what_it_does_not_know() -> None:
    with pytest.raises(UserError, match="minimax cannot play 'debate-v0'; it knows nim, tictactoe"):
        MinimaxPlayer(context("debate-v0"))
    with pytest.raises(UserError, match="cannot read this tic-tac-toe view"):
        ask(MinimaxPlayer(context()), decision("a different text"))


# ── equilibrium ───────────────────────────────────────────────────────────────────────────────────


def test_equilibrium_mixes_as_the_table_says() -> None:
    view = "Card: {1}. History: {0}. Pass or bet? Bet or pass?"
    rules = "You play Kuhn poker. Answer with one word, pass or bet."
    for history, card, p in (
        ("none", "J", 0.3),
        ("none", "Q", 0.0),
        ("none", "K", 0.9),
        ("bet", "Q", 1 / 3),
        ("pass, bet", "K", 1.0),
    ):
        player = EquilibriumPlayer(context("kuhn-poker-v0", alpha=0.3))
        asked = decision(view.format(history, card), ("pass", "bet"), rules)
        share = sum(ask(player, asked).text == "bet" for _ in range(1000)) / 1000
        assert share == pytest.approx(p, abs=0.06)


def test_equilibrium_holds_its_value_against_any_opponent() -> None:
    wins = [
        game("kuhn-poker-v0", {"player_0": "random", "player_1": "equilibrium"}, s).rewards["player_1"]
        for s in range(1500)
    ]
    assert sum(wins) / len(wins) > 1 / 18 - 0.1


def test_equilibrium_refuses_other_games() -> None:
    with pytest.raises(UserError, match="it knows kuhn-poker"):
        EquilibriumPlayer(context("tictactoe-v0"))
    with pytest.raises(ConfigError, match=r"alpha is 0\.5; it must be between 0 and 1/3"):
        EquilibriumPlayer(context("kuhn-poker-v0", alpha=0.5))
    with pytest.raises(UserError, match="two players only"):
        game("kuhn-poker-v0", {f"player_{i}": "equilibrium" for i in range(3)}, 1, players=3)


# ── human ─────────────────────────────────────────────────────────────────────────────────────────


def test_a_person_is_shown_rules_once_then_views_and_moves() -> None:
    shown: list[str] = []
    lines = iter(["5", "again", None])
    player = HumanPlayer(context(), read_line=lambda: next(lines), show=shown.append)
    assert ask(player, decision("the view", ("1", "5"), "the rules")).text == "5"
    assert shown[-1] == "[x] the rules\nthe view\nlegal moves: 1, 5"
    ask(player, decision("the view", None, "the rules", complaint="no such move"))
    assert shown[-1] == "! no such move"
    assert ask(player, decision("the view", None)).text == ""
    assert "you leave the game" in shown[-1]
    assert ask(player, decision("the view", None)).text == ""  # nothing is read any more


def test_what_a_person_is_shown_cannot_control_the_terminal() -> None:
    shown: list[str] = []
    player = HumanPlayer(context(), read_line=lambda: "x", show=shown.append)
    ask(player, decision("red \x1b[31m text\rfake line \u202e", None))
    assert shown == ["[x] \nred \\x1b[31m text\\x0dfake line \\u202e"]


def test_cancelling_a_waiting_person_leaves_nothing_to_wait_for() -> None:
    release = threading.Event()

    def wait_for_line() -> str:
        release.wait(30)
        return "late"

    async def cancelled() -> None:
        task = asyncio.create_task(HumanPlayer(context(), wait_for_line, lambda _: None).decide(decision("v")))
        await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    try:
        asyncio.run(cancelled())  # would wait 30 s if the thread were one of the loop's own
    finally:
        release.set()


def test_leaving_forfeits_and_the_process_ends_well() -> None:
    command = [sys.executable, "-m", "selfplay.cli.main", "play", "tictactoe-v0", "--players", "human,random"]
    code = "import sys; from selfplay.cli.main import main; sys.exit(main(sys.argv[1:]))"
    done = subprocess.run(
        [sys.executable, "-c", code, *command[3:]], input="5\n", capture_output=True, text=True, timeout=PATIENCE_S
    )
    assert done.returncode == 0
    assert "result: o won (forfeit)" in done.stdout
    assert "you leave the game" in done.stderr
    assert "Traceback" not in done.stderr
    assert "Fatal" not in done.stderr


# ── mcts ──────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("env_id", "seats"), [("tictactoe-v0", ("x", "o")), ("openspiel:tic_tac_toe", ("player_0", "player_1"))]
)
def test_mcts_never_loses_at_tictactoe(env_id: str, seats: tuple[str, str]) -> None:
    for seed in range(4):
        first = seed % 2
        episode = game(env_id, {seats[first]: "mcts", seats[1 - first]: "random"}, seed)
        assert seats[1 - first] not in episode.winners
        assert episode.ended == "natural"


def test_mcts_takes_a_win_and_sees_a_threat() -> None:
    """Column 1 wins for x, who moves; found from the view of a game that it did not see the beginning of."""
    from selfplay_agents.mcts import MctsPlayer

    position = make_environment("connect-four-v0", {}, 0)
    for seat, column in zip("xoxoxo", "112233", strict=True):
        position.step({seat: column})
    player = MctsPlayer(context("connect-four-v0", simulations=200))
    with pytest.raises(UserError, match="cannot find the position"):
        ask(player, Decision(seat="x", round=0, rules="", view="nothing like it", legal_moves=None))
    player._apply([(s, c) for s, c in zip("xoxoxo", "112233", strict=True)])
    shown = Decision(
        seat="x", round=3, rules="", view=position.view("x"), legal_moves=tuple(position.legal_moves("x") or ())
    )
    assert ask(player, shown).text == "4"


@pytest.mark.parametrize(
    ("env_id", "options", "told"),
    [
        ("kuhn-poker-v0", {}, "mcts cannot play 'kuhn-poker-v0'; it knows connect-four-v0, tictactoe-v0"),
        ("openspiel:kuhn_poker", {}, "is imperfect information"),
        ("tictactoe-v0", {"simulations": 0}, "simulations is 0; it must be 1 to 1000000"),
    ],
)
def test_mcts_says_what_it_cannot_play(env_id: str, options: dict[str, Any], told: str) -> None:
    from selfplay_agents.mcts import MctsPlayer

    with pytest.raises(UserError, match=told):
        MctsPlayer(context(env_id, **options))
