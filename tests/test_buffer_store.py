"""The episode buffer: bounds in episodes and bytes, refusal instead of loss, order, staleness."""

from __future__ import annotations

import pytest

from episode_samples import encode, episode, seat, turn
from selfplay.buffer import BufferFull, EpisodeBuffer, EpisodeTooBig

NOW = {"pro": 0, "con": 0}


def put(buffer: EpisodeBuffer, seq: int, **kw: object) -> int:
    e = episode(seq, **kw)  # type: ignore[arg-type]
    data = encode(e)
    buffer.put(seq, data, e)
    return len(data)


def test_first_in_first_out_and_whole() -> None:
    buffer = EpisodeBuffer(max_episodes=10, max_bytes=10**6)
    for seq in range(4):
        put(buffer, seq)
    taken = buffer.take(3, NOW)
    assert [e.seq for e in taken] == [0, 1, 2]
    assert taken[1].episode == episode(1)
    assert len(buffer) == 1


def test_bytes_are_counted_exactly() -> None:
    buffer = EpisodeBuffer(max_episodes=10, max_bytes=10**6)
    sizes = [put(buffer, seq) for seq in range(3)]
    assert buffer.num_bytes == sum(sizes)
    assert sum(e.num_bytes for e in buffer.take(2, NOW)) == sizes[0] + sizes[1]
    assert buffer.num_bytes == sizes[2]
    buffer.take(1, NOW)
    assert buffer.num_bytes == 0


def test_a_full_buffer_refuses_and_counts_and_keeps_what_it_has() -> None:
    buffer = EpisodeBuffer(max_episodes=2, max_bytes=10**6)
    put(buffer, 0)
    put(buffer, 1)
    with pytest.raises(BufferFull, match="2 of 2 episodes"):
        put(buffer, 2)
    assert (buffer.seqs, buffer.num_refused_full) == ((0, 1), 1)
    buffer.take(1, NOW)
    put(buffer, 2)
    assert buffer.seqs == (1, 2)


def test_bytes_bound_the_buffer_when_episodes_are_long() -> None:
    long = tuple(range(60_000))
    e = episode(1, turns=(turn("pro", (1,), long), turn("con", (1,), long)))
    data = encode(e)
    buffer = EpisodeBuffer(max_episodes=100, max_bytes=3 * len(data) + 10)
    for seq in range(3):
        buffer.put(seq, data, e)
    assert not buffer.has_room(len(data))
    with pytest.raises(BufferFull, match="bytes"):
        buffer.put(3, data, e)
    assert buffer.num_bytes == 3 * len(data) <= buffer.max_bytes


def test_an_episode_that_never_fits_is_refused_with_the_remedy() -> None:
    buffer = EpisodeBuffer(max_episodes=2, max_bytes=50)
    with pytest.raises(EpisodeTooBig, match=r"over buffer\.max_bytes=50"):
        put(buffer, 0)
    assert buffer.num_refused_too_big == 1
    assert len(buffer) == 0


def test_a_number_can_be_held_once() -> None:
    buffer = EpisodeBuffer(max_episodes=5, max_bytes=10**6)
    put(buffer, 7)
    with pytest.raises(ValueError, match="already"):
        put(buffer, 7)


def test_taking_more_than_there_is_takes_nothing() -> None:
    buffer = EpisodeBuffer(max_episodes=5, max_bytes=10**6)
    put(buffer, 0)
    with pytest.raises(ValueError, match="asked for 2"):
        buffer.take(2, NOW)
    assert len(buffer) == 1


def test_the_stalest_goes_first_and_then_the_first_that_came() -> None:
    buffer = EpisodeBuffer(max_episodes=5, max_bytes=10**6)
    put(buffer, 0, versions={"pro": 3, "con": 3})
    put(buffer, 1, versions={"pro": 3, "con": 2})
    put(buffer, 2, versions={"pro": 3, "con": 3})
    taken = buffer.take(3, {"pro": 3, "con": 3})
    assert [(e.seq, e.staleness) for e in taken] == [(1, 1), (0, 0), (2, 0)]


def test_stale_episodes_are_dropped_and_named() -> None:
    buffer = EpisodeBuffer(max_episodes=5, max_bytes=10**6)
    put(buffer, 0, versions={"pro": 0, "con": 4})
    put(buffer, 1, versions={"pro": 4, "con": 4})
    stale = buffer.drop_stale({"pro": 4, "con": 4}, max_staleness=3)
    assert [(s.seq, s.episode_id, s.staleness) for s in stale] == [(0, "0.0", 4)]
    assert buffer.seqs == (1,)
    assert buffer.num_bytes == len(encode(episode(1, versions={"pro": 4, "con": 4})))


def test_frozen_opponents_do_not_age() -> None:
    buffer = EpisodeBuffer(max_episodes=5, max_bytes=10**6)
    seats = (seat("pro"), seat("con", "old", trained=False, pin=0))
    put(buffer, 0, seats=seats, versions={"pro": 9})
    assert buffer.staleness({"pro": 9}) == {0: 0}


def test_an_episode_of_a_version_not_current_yet_is_fresh() -> None:
    buffer = EpisodeBuffer(max_episodes=5, max_bytes=10**6)
    put(buffer, 0, versions={"pro": 3, "con": 3})
    assert buffer.staleness({"pro": 1, "con": 1}) == {0: 0}


@pytest.mark.parametrize(("batch", "due", "stuck"), [(2, 0, False), (3, 0, True), (2, 1, True)])
def test_a_buffer_that_can_never_feed_a_step_says_so(batch: int, due: int, stuck: bool) -> None:
    buffer = EpisodeBuffer(max_episodes=2, max_bytes=10**6)
    put(buffer, 0)
    put(buffer, 1)
    message = buffer.why_stuck(batch, due)
    assert (message is not None) == stuck
    if message:
        assert "buffer.max_bytes" in message


@pytest.mark.parametrize(("episodes", "num_bytes"), [(0, 5), (5, 0), (-1, 5)])
def test_a_buffer_that_can_hold_nothing_is_refused(episodes: int, num_bytes: int) -> None:
    with pytest.raises(ValueError, match="can hold nothing"):
        EpisodeBuffer(max_episodes=episodes, max_bytes=num_bytes)
