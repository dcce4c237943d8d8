"""Segments: exactly the agent's own sampled tokens are actions, each behind the context it was sampled from."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from episode_samples import episode, seat, turn
from selfplay.scoring import action_counts, agents_with_signal, episode_segments
from selfplay.scoring.segments import SegmentAges, learning_now, segment_ages
from selfplay.types import Episode, Segment, Span, Turn

BOTH = {"pro": 1.0, "con": -1.0}


def by_seat(segments: list[Segment], name: str) -> list[Segment]:
    return [s for s in segments if s.seat == name]


def test_a_two_turn_game_by_hand() -> None:
    turns = (
        turn("pro", (10, 11), (12, 13)),
        turn("con", (20,), (21,)),
        turn("pro", (14,), (15, 16, 17), version=3),
    )
    pro, con = episode_segments(episode(turns=turns), BOTH)
    assert pro.ids == (10, 11, 12, 13, 14, 15, 16, 17)
    assert pro.mask == (0, 0, 1, 1, 0, 1, 1, 1)
    assert pro.advantages == (0, 0, 1, 1, 0, 1, 1, 1)
    assert pro.logprobs == pytest.approx((0, 0, -0.1, -0.2, 0, -0.1, -0.2, -0.3))
    assert (pro.agent, pro.versions, pro.num_actions) == ("pro", (0, 3), 5)
    assert (con.ids, con.mask, con.advantages) == ((20, 21), (0, 1), (0, -1))


def test_a_fork_starts_a_new_segment() -> None:
    turns = (
        turn("pro", (1,), (2,)),
        turn("pro", (1, 9), (3,), fork=True, version=1),
        turn("pro", (4,), (5,), version=2),
    )
    first, second = by_seat(episode_segments(episode(turns=turns), BOTH), "pro")
    assert (first.ids, first.mask, first.versions) == ((1, 2), (0, 1), (0, 0))
    assert (second.ids, second.mask, second.versions) == ((1, 9, 3, 4, 5), (0, 0, 1, 0, 1), (1, 2))


def test_the_stop_token_is_trained() -> None:
    stop = 2
    (pro,) = by_seat(episode_segments(episode(turns=(turn("pro", (1,), (7, stop)),)), BOTH), "pro")
    assert pro.ids[-1] == stop
    assert pro.mask[-1] == 1


def test_illegal_tries_are_actions_too() -> None:
    turns = (turn("pro", (1,), (2,), move=None), turn("pro", (3,), (4,)))
    (pro,) = by_seat(episode_segments(episode(turns=turns), BOTH), "pro")
    assert pro.mask == (0, 1, 0, 1)


def test_empty_turns_have_no_actions_and_keep_their_context() -> None:
    turns = (turn("pro", (1,), ()), turn("pro", (2,), (3,)), turn("con", (5,), ()))
    segments = episode_segments(episode(turns=turns), BOTH)
    assert [s.ids for s in segments] == [(1, 2, 3)]


def test_context_after_the_last_action_is_cut_off() -> None:
    turns = (turn("pro", (1,), (2,)), turn("pro", (3, 4, 5), ()))
    (pro,) = by_seat(episode_segments(episode(turns=turns), BOTH), "pro")
    assert pro.ids == (1, 2)


def test_only_trained_seats_have_segments() -> None:
    seats = (seat("pro"), seat("con", "old", trained=False, pin=3))
    assert {s.seat for s in episode_segments(episode(seats=seats), {"pro": 1.0})} == {"pro"}


def test_one_agent_at_two_seats_gives_two_streams() -> None:
    seats = (seat("pro", "solo"), seat("con", "solo"))
    segments = episode_segments(episode(seats=seats), BOTH)
    assert [(s.agent, s.seat, s.advantages[-1]) for s in segments] == [("solo", "pro", 1), ("solo", "con", -1)]


def test_advantages_per_turn() -> None:
    turns = (turn("pro", (1,), (2,)), turn("con", (1,), (2,)), turn("pro", (3,), (4, 5)))
    (pro,) = by_seat(episode_segments(episode(turns=turns), {"pro": [0.5, -2.0], "con": 0.0}), "pro")
    assert pro.advantages == (0, 0.5, 0, -2, -2)
    with pytest.raises(ValueError, match="2 turns but 3 advantages"):
        episode_segments(episode(turns=turns), {"pro": [1, 2, 3], "con": 0.0})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"prompt_ids": ()}, "empty context"),
        ({"logprobs": (-1.0,)}, "2 sampled tokens but 1 logprobs"),
        ({"spans": ()}, "which version"),
    ],
)
def test_a_record_that_cannot_be_trained_on_is_named(change: dict[str, Any], message: str) -> None:
    bad = msgspec.structs.replace(turn("pro", (1,), (2, 3)), **change)
    with pytest.raises(ValueError, match=rf"episode 0\.0, seat pro, turn 0.*{message}"):
        episode_segments(episode(turns=(bad,)), BOTH)


def test_an_agent_without_signal_is_left_out_of_the_step() -> None:
    segments = episode_segments(episode(), {"pro": 0.0, "con": -0.0})
    assert agents_with_signal(segments) == ()
    segments += episode_segments(episode(1), {"pro": 0.0, "con": 0.5})
    assert agents_with_signal(segments) == ("con",)
    assert action_counts(segments, ["con"]) == {"con": 4}
    assert action_counts(segments, ["con", "idle"]) == {"con": 4, "idle": 0}


TOKENS = st.lists(st.integers(0, 50), max_size=4).map(tuple)


@st.composite
def games(draw: st.DrawFn) -> Episode:
    turns: list[Turn] = []
    started: set[str] = set()
    for version in range(draw(st.integers(0, 8))):
        name = draw(st.sampled_from(["pro", "con"]))
        fork = draw(st.booleans())
        prompt = draw(TOKENS)
        if fork or name not in started:
            prompt = (99, *prompt)
        started.add(name)
        turns.append(
            turn(name, prompt, draw(TOKENS), version=version, fork=fork, move=draw(st.sampled_from([None, "x"])))
        )
    return episode(turns=tuple(turns))


def contexts(game: Episode, name: str) -> list[tuple[tuple[int, ...], int]]:
    """(everything before it, token) of each sampled token, straight from the definition of a context."""
    out, context = [], ()
    for t in game.turns:
        if t.seat == name:
            context = t.prompt_ids if t.fork else context + t.prompt_ids
            for token in t.sampled_ids:
                out.append((context, token))
                context += (token,)
    return out


@given(games())
def test_every_action_stands_behind_what_it_was_sampled_from(game: Episode) -> None:
    segments = episode_segments(game, BOTH)
    for name in BOTH:
        got = [(s.ids[:t], s.ids[t]) for s in by_seat(segments, name) for t in range(len(s.ids)) if s.mask[t]]
        assert got == contexts(game, name)
        assert sum(s.num_actions for s in by_seat(segments, name)) == sum(
            len(t.sampled_ids) for t in game.turns if t.seat == name
        )
    for s in segments:
        assert len(s.ids) == len(s.mask) == len(s.logprobs) == len(s.advantages)
        assert s.mask[0] == 0
        assert s.mask[-1] == 1
        assert all(a == 0 and p == 0 for a, p, m in zip(s.advantages, s.logprobs, s.mask, strict=True) if not m)


@given(games(), st.integers(0, 50))
def test_what_the_opponent_sampled_changes_nothing(game: Episode, token: int) -> None:
    def altered(t: Turn) -> Turn:
        if t.seat == "pro":
            return t
        other = (token,) * (len(t.sampled_ids) + 1)
        spans = (Span(0, 0, len(other)),)
        return msgspec.structs.replace(t, sampled_ids=other, logprobs=(-1.0,) * len(other), spans=spans, text="altered")

    changed = msgspec.structs.replace(game, turns=tuple(altered(t) for t in game.turns))
    assert by_seat(episode_segments(changed, BOTH), "pro") == by_seat(episode_segments(game, BOTH), "pro")


# ── who learns, and how old what it learns from is ───────────────────────────────────────────────


def test_agents_take_turns() -> None:
    """Two steps each, by sorted names; an agent without signal does not lose its turn to another."""
    trained = ("pro", "con")
    turns = [learning_now(("con", "pro"), trained, step, 2) for step in range(6)]
    assert turns == [("con",), ("con",), ("pro",), ("pro",), ("con",), ("con",)]
    assert learning_now(("pro",), trained, 0, 2) == ()
    assert learning_now(("pro", "con"), trained, 5, 0) == ("con", "pro")


def test_ages_are_of_each_agents_own_segments() -> None:
    """Versions 3–5 and 5–5 learnt from at 6: staleness 3 and 1, span 2, one of two without signal; the other agent is at its own version."""
    old, new, other = (
        msgspec.structs.replace(SEGMENT, agent=a, versions=v, advantages=(0.0, advantage))
        for a, v, advantage in (("pro", (3, 5), 1.0), ("pro", (5, 5), 0.0), ("con", (2, 2), -1.0))
    )
    found = segment_ages([old, new, other], {"pro": 6, "con": 2})
    assert found["pro"] == SegmentAges(staleness_mean=2.0, staleness_max=3, span_max=2, silent_share=0.5)
    assert found["con"] == SegmentAges()


SEGMENT = Segment(
    episode_id="0.0",
    agent="pro",
    seat="pro",
    ids=(1, 2),
    mask=(0, 1),
    logprobs=(0.0, -1.0),
    advantages=(0.0, 1.0),
    versions=(0, 0),
)


def test_what_was_left_to_sample_from_goes_with_each_action() -> None:
    turns = (
        turn("pro", (1,), (2, 3)),
        msgspec.structs.replace(turn("pro", (4,), (5,)), kept=((5, 6),)),
        turn("con", (1,), (2,)),
    )
    pro, con = episode_segments(episode(turns=turns), {"pro": 1.0, "con": 1.0})
    assert pro.kept == ((), (), (5, 6))
    assert con.kept == ()
