"""Episodes with impossible numbers are put aside with a reason before they reach anything that learns."""

from __future__ import annotations

import math
from typing import Any

import msgspec
import pytest

from episode_samples import encode, episode, seat, turn
from selfplay.scoring import why_unusable
from selfplay.types import Episode

INF, NAN = math.inf, math.nan


def with_turn(**changes: Any) -> Episode:
    return episode(turns=(msgspec.structs.replace(turn("pro", (1,), (2, 3)), **changes), turn("con", (1,), (2,))))


def test_a_sound_episode_is_usable() -> None:
    assert why_unusable(episode(), (-1.0, 1.0)) is None
    assert why_unusable(with_turn(sampled_ids=(), logprobs=(), spans=())) is None


@pytest.mark.parametrize("logprob", [NAN, -INF, INF])
def test_a_logprob_that_is_no_number(logprob: float) -> None:
    found = why_unusable(with_turn(logprobs=(-0.5, logprob)))
    assert found is not None
    assert found.reason == "non-finite logprob"
    assert "seat pro" in found.detail


@pytest.mark.parametrize("reward", [NAN, INF, -INF])
def test_a_reward_that_is_no_number(reward: float) -> None:
    found = why_unusable(episode(rewards={"pro": reward, "con": 0.0}))
    assert found is not None
    assert found.reason == "non-finite reward"


@pytest.mark.parametrize("reward", [1e308, -1.1, 2])
def test_a_reward_outside_the_declared_range(reward: float) -> None:
    found = why_unusable(episode(rewards={"pro": reward, "con": 0.0}), (-1.0, 1.0))
    assert found is not None
    assert found.reason == "reward out of range"
    assert "[-1.0, 1.0]" in found.detail


def test_float_dust_at_the_edge_of_the_range_is_no_fault() -> None:
    assert why_unusable(episode(rewards={"pro": 1.0 + 1e-12, "con": -0.0}), (-1.0, 1.0)) is None


def test_what_a_forfeit_costs_may_lie_outside_the_range_of_play() -> None:
    lost = episode(ended="forfeit", offender="pro", rewards={"pro": -2.0, "con": 2.0}, winners=("con",))
    assert why_unusable(lost, (-1.0, 1.0)) is None


@pytest.mark.parametrize(
    "changes",
    [
        {"logprobs": (-0.1,)},
        {"logprobs": (0.5, -0.1)},
        {"spans": ()},
        {"prompt_ids": ()},
        {"agent": "con"},
        {"seat": "judge"},
    ],
    ids=str,
)
def test_records_that_contradict_themselves(changes: dict[str, Any]) -> None:
    found = why_unusable(with_turn(**changes))
    assert found is not None
    assert found.reason == "inconsistent record"
    assert found.detail


def test_a_fork_without_context_is_found() -> None:
    turns = (turn("pro", (1,), (2,)), turn("pro", (), (3,), fork=True))
    found = why_unusable(episode(turns=turns))
    assert found is not None
    assert "empty context" in found.detail


def test_untrained_seats_need_no_token_record() -> None:
    seats = (seat("pro"), seat("con", "random", trained=False, player="random"))
    turns = (turn("pro", (1,), (2,)), turn("con", (), (), agent="random"))
    assert why_unusable(episode(seats=seats, turns=turns)) is None


@pytest.mark.parametrize("reward", ["1", None, [1], {"a": 1}, True])
def test_a_reward_of_another_type_does_not_even_decode(reward: Any) -> None:
    raw = msgspec.msgpack.decode(encode(episode()))
    raw["rewards"]["pro"] = reward
    with pytest.raises(msgspec.ValidationError):
        msgspec.msgpack.decode(msgspec.msgpack.encode(raw), type=Episode)


def test_one_spoilt_episode_spoils_no_other() -> None:
    games = [episode(0), episode(1, rewards={"pro": NAN, "con": 0.0}), episode(2)]
    assert [why_unusable(g) is None for g in games] == [True, False, True]
