"""Whatever an environment does wrong is an `EnvironmentFault` that names the field and the place in the game."""

from __future__ import annotations

import asyncio
import io
import random
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from selfplay.environment import Environment, Outcome
from selfplay.errors import EnvironmentFault, IllegalMove
from selfplay.play import play
from selfplay.types import episode_faults
from selfplay.wire.codec import encode
from toy_games import Scripted, Turns, match_of, play_toy, seated

RNG = random.Random(0)


def ended_with(outcome: Any, seats: Sequence[str] = ("a", "b"), **attributes: Any) -> Any:
    game = Turns(RNG, seats=seats, length=2)
    game.result = outcome
    for name, value in attributes.items():
        setattr(game, name, value)
    return play_toy(game, seated(game))


def rewards(values: Any, **attributes: Any) -> dict[str, float]:
    return dict(ended_with(Outcome(rewards=values), **attributes).rewards)


# ── the environment raises ────────────────────────────────────────────────────────────────────────


class Raises(Turns):
    def __init__(self, where: str, error: BaseException) -> None:
        super().__init__(RNG, length=9)
        self.where, self.error = where, error

    def _maybe(self, where: str) -> None:
        if where == self.where and len(self.played) == 2:
            raise self.error

    def to_move(self) -> Sequence[str]:
        self._maybe("to_move")
        return super().to_move() if self.where not in ("outcome", "jury_questions") or len(self.played) < 2 else ()

    def view(self, seat: str) -> str:
        self._maybe("view")
        return super().view(seat)

    def legal_moves(self, seat: str) -> Sequence[str] | None:
        self._maybe("legal_moves")
        return super().legal_moves(seat)

    def parse(self, seat: str, text: str) -> str:
        self._maybe("parse")
        return super().parse(seat, text)

    def step(self, moves: Mapping[str, str]) -> None:
        self._maybe("step")
        super().step(moves)

    def outcome(self) -> Outcome:
        self._maybe("outcome")
        return super().outcome()

    def jury_questions(self) -> Sequence[Any]:
        self._maybe("jury_questions")
        return ()


@pytest.mark.parametrize("where", ["to_move", "view", "legal_moves", "parse", "step", "outcome", "jury_questions"])
@pytest.mark.parametrize("error", [ValueError("bad card 53"), SystemExit(3), AssertionError("x")])
def test_the_original_traceback_with_env_seed_seat_and_turn(where: str, error: BaseException) -> None:
    players = {"a": Scripted("x"), "b": Scripted("x")}
    with pytest.raises(EnvironmentFault) as caught:
        play_toy(Raises(where, error), players, seed=77)
    fault = caught.value
    assert (fault.env, fault.seed, fault.turn) == ("toy-v0", 77, 2)
    assert fault.seat == ("a" if where in ("view", "legal_moves", "parse", "step") else "")
    assert type(error).__name__ in str(fault)
    assert "_maybe" in fault.traceback  # the frame that raised
    assert [p.closed for p in players.values()] == [1, 1]


def test_an_illegal_move_raised_by_step_is_a_fault() -> None:
    with pytest.raises(EnvironmentFault, match="a move is refused in parse"):
        play_toy(Raises("step", IllegalMove("no")), {"a": Scripted("x"), "b": Scripted("x")})


@pytest.mark.parametrize(
    ("method", "value", "message"),
    [
        ("to_move", ("nobody",), "'nobody', which is not a seat: a, b"),
        ("to_move", ("a", "a"), "named a seat twice"),
        ("to_move", None, "TypeError"),
        ("view", None, "view\\(\\) returned None"),
        ("view", b"bytes", "view\\(\\) returned b'bytes'"),
        ("rules", 3, "rules\\(\\) returned 3"),
        ("legal_moves", (), "legal_moves\\(\\) is empty"),
        ("parse", (3, 4), "parse\\(\\) returned \\(3, 4\\)"),
        ("outcome", None, "outcome\\(\\) returned None"),
    ],
)
def test_answers_that_are_none(method: str, value: Any, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    game = Turns(RNG, length=1)
    monkeypatch.setattr(game, method, lambda *_: value)
    with pytest.raises(EnvironmentFault, match=message):
        play_toy(game, {"a": Scripted("x"), "b": Scripted("x")})


# ── rewards and outcomes ──────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    "bad", [float("nan"), float("inf"), -float("inf"), 1e308, 2**70, 10**400, "1", None, 1.5, True, [1.0], 1j]
)
def test_rewards_that_are_none(bad: Any) -> None:
    with pytest.raises(EnvironmentFault, match=r"rewards\['a'\] is "):
        rewards({"a": bad, "b": -1.0})


@pytest.mark.parametrize("one", [1, 1.0, np.float32(1), np.float64(1), np.int64(1)])
def test_numbers_of_every_kind_become_floats(one: Any) -> None:
    out = rewards({"a": one, "b": -one})
    assert out == {"a": 1.0, "b": -1.0}
    assert all(type(r) is float for r in out.values())


def test_minus_zero_is_zero() -> None:
    assert str(rewards({"a": -0.0, "b": 0.0})) == "{'a': 0.0, 'b': 0.0}"


def test_positions_as_keys_become_seats() -> None:
    assert rewards({0: 1, 1: -1}) == {"a": 1.0, "b": -1.0}
    assert rewards({np.int64(1): -1, np.int64(0): 1}) == {"a": 1.0, "b": -1.0}
    assert ended_with(Outcome(rewards={0: 1, 1: -1}, winners=(0,))).winners == ("a",)  # type: ignore[dict-item, arg-type]
    assert ended_with(Outcome(rewards={0: 1, 1: -1}, winners=("1",)), seats=("0", "1")).rewards == {"0": 1.0, "1": -1.0}  # type: ignore[dict-item]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"a": 1.0}, "rewards lack 'b'"),
        ({"a": 1.0, "b": -1.0, "c": 0.0}, "'c' is not a seat; the seats are a, b"),
        ({"a": 1.0, 0: 1.0, "b": -1.0}, "seat 'a' twice"),
        ({None: 1.0, "b": -1.0}, "None is not a seat"),
        ({2: 1.0, "b": -1.0}, "2 is not a seat"),
        ({"a": 1.0, "b": 0.0}, "sum to 1 although zero_sum is declared"),
    ],
)
def test_rewards_for_the_wrong_seats(values: Any, message: str) -> None:
    with pytest.raises(EnvironmentFault, match=message):
        rewards(values)


def test_an_integer_and_its_text_clash() -> None:
    with pytest.raises(EnvironmentFault, match="seat '0' twice"):
        ended_with(Outcome(rewards={0: 1.0, "0": 1.0, "1": -1.0}), seats=("0", "1"))  # type: ignore[dict-item]


def test_the_declared_range_holds() -> None:
    assert rewards({"a": 2.0, "b": -2.0}, reward_range=(-2.0, 2.0)) == {"a": 2.0, "b": -2.0}
    with pytest.raises(EnvironmentFault, match=r"outside the declared range \[-2, 2\]"):
        rewards({"a": 2.1, "b": -2.1}, reward_range=(-2.0, 2.0))
    assert rewards({"a": 0.2, "b": 0.3}, zero_sum=False) == {"a": 0.2, "b": 0.3}


def test_the_game_decides_the_winner_not_the_sign_of_a_reward() -> None:
    episode = ended_with(Outcome(rewards={"a": 0.2, "b": 0.0}, winners=("b",)), zero_sum=False)
    assert episode.winners == ("b",)


def test_winners_that_are_not_seats() -> None:
    with pytest.raises(EnvironmentFault, match="winners: 'z' is not a seat"):
        ended_with(Outcome(rewards={"a": 1.0, "b": -1.0}, winners=("z",)))


def test_info_is_plain_or_refused() -> None:
    values = {"f": np.float32(0.5), "i": np.int64(3), "b": np.bool_(True), "s": "x\ud83d"}
    info = ended_with(Outcome(rewards={"a": 0.0, "b": 0.0}, info=values)).info  # type: ignore[arg-type]
    assert info == {"f": 0.5, "i": 3, "b": True, "s": "x�"}
    assert encode(info)
    for bad in (2**70, -(2**63) - 1, np.zeros(3), float("nan"), None, {"x": 1}, (3, 4)):
        with pytest.raises(EnvironmentFault, match=r"info\['bad'\] is "):
            ended_with(Outcome(rewards={"a": 0.0, "b": 0.0}, info={"bad": bad}))  # type: ignore[dict-item]


def test_info_keys_become_text_and_may_not_meet() -> None:
    nothing = {"a": 0.0, "b": 0.0}
    assert ended_with(Outcome(rewards=nothing, info={(3, 4): 1, 0: 2})).info == {"(3, 4)": 1, "0": 2}  # type: ignore[dict-item]
    with pytest.raises(EnvironmentFault, match="info names '0' twice"):
        ended_with(Outcome(rewards=nothing, info={0: 1, "0": 2}))  # type: ignore[dict-item]


def test_a_board_with_tuples_as_keys_and_moves_of_numpy_stays_the_games_own() -> None:
    """Positions are numbers of numpy's and keys are tuples inside the game; only text goes in and out."""

    class Board(Turns):
        def legal_moves(self, seat: str) -> Sequence[str]:
            return np.arange(4)  # type: ignore[return-value]

        def step(self, moves: Mapping[str, str]) -> None:
            self.board = {**getattr(self, "board", {}), divmod(int(*moves.values()), 2): len(self.played)}
            assert (1, 1) in self.board
            super().step(moves)

    game = Board(RNG, length=2)
    episode = play_toy(game, {"a": Scripted("3"), "b": Scripted("3")})
    assert episode_faults(episode) == []
    assert [t.move for t in episode.turns] == ["3", "3"]


@given(
    st.dictionaries(
        st.one_of(st.sampled_from(["a", "b", "c"]), st.integers(-1, 3), st.none()),
        st.one_of(st.floats(), st.integers(), st.text()),
    )
)
def test_any_rewards_end_in_a_sound_episode_or_a_named_fault(values: Any) -> None:
    fault, episode = "", None
    try:
        episode = ended_with(Outcome(rewards=values))
    except EnvironmentFault as e:
        fault = str(e)
    if episode is None:
        assert "reward" in fault
    else:
        assert episode_faults(episode) == []
        assert abs(sum(episode.rewards.values())) < 1e-4
        assert encode(episode)


# ── isolation ─────────────────────────────────────────────────────────────────────────────────────


class GlobalDice(Environment):
    """Draws from the global generator, by the module and by a name bound at import, in every method."""

    seats = ("a", "b")

    def __init__(self, rng: random.Random) -> None:
        super().__init__(rng)
        self.rolls: list[str] = []

    def rules(self, seat: str) -> str:
        return "dice"

    def to_move(self) -> Sequence[str]:
        return () if len(self.rolls) == 6 else (self.seats[len(self.rolls) % 2],)

    def view(self, seat: str) -> str:
        return f"{random.random()} {random.gauss(0, 1)}"

    def step(self, moves: Mapping[str, str]) -> None:
        self.rolls.append(f"{random.randint(1, 10**9)}")

    def outcome(self) -> Outcome:
        return Outcome(rewards={"a": 0.0, "b": 0.0}, info={"rolls": " ".join(self.rolls)})


class Echo(Scripted):
    """Draws from the global generator too, as a careless agent would, and waits now and then."""

    async def decide(self, decision: Any) -> Any:
        random.random()
        await asyncio.sleep(0)
        return await super().decide(decision)


def _game(seed: int) -> Any:
    players = {"a": Echo(lambda d: d.view), "b": Echo(lambda d: d.view)}
    return play("dice-v0", GlobalDice(RNG), players, match_of("ab", seed=seed), env_source="t")


def _texts(episode: Any) -> list[str]:
    return [t.text for t in episode.turns] + [episode.info["rolls"]]


def test_global_randomness_is_the_episodes_own_at_any_concurrency() -> None:
    alone = {seed: _texts(asyncio.run(_game(seed))) for seed in range(8)}

    async def together() -> list[Any]:
        return await asyncio.gather(*(_game(seed) for seed in range(8)))

    random.seed(123)
    assert {seed: _texts(e) for seed, e in enumerate(asyncio.run(together()))} == alone
    assert len({tuple(t) for t in alone.values()}) == 8


def test_the_callers_global_state_is_untouched() -> None:
    random.seed(5)
    random.gauss(0, 1)
    before = random.getstate()

    class Seeds(Turns):
        def step(self, moves: Mapping[str, str]) -> None:
            random.seed(1)
            random.gauss(0, 1)
            super().step(moves)

    game = Seeds(RNG)
    play_toy(game, seated(game))
    assert random.getstate() == before
    with pytest.raises(EnvironmentFault):
        play_toy(Raises("step", ValueError("x")), {"a": Scripted("x"), "b": Scripted("x")})
    assert random.getstate() == before


def test_prints_are_kept_off_standard_output_and_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    class Chatty(Turns):
        def step(self, moves: Mapping[str, str]) -> None:
            print("x" * 99)
            super().step(moves)

    out = io.StringIO()
    monkeypatch.setattr(sys, "stdout", out)
    game = Chatty(RNG)
    episode = play_toy(game, seated(game))
    assert out.getvalue() == ""
    assert sys.stdout is out
    assert episode.info == {"printed_chars": 400}
