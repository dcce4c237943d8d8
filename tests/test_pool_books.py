"""The pool's books, checks and board, without processes."""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest

from pool_site import make_match
from selfplay.pool.board import Board, episode, watch_tasks
from selfplay.pool.config import scrubbed_environment
from selfplay.pool.leases import Leases
from selfplay.pool.results import EpisodeResult, FailedResult, Lease, checked_result
from selfplay.types import Episode, Span, Turn
from selfplay.wire.codec import encode
from selfplay.wire.messages import EpisodeDone, EpisodeFailed

MATCH = make_match(4, pin=2)
LEASE = Lease(match=MATCH, worker="w", since=0.0)
TURN = Turn(
    seat="a", agent="agent-a", round=0, sampled_ids=(1, 2), logprobs=(-0.5, -0.25), spans=(Span(2, 0, 2),), text="x", move="x"
)  # fmt: skip
EPISODE = Episode(
    match=MATCH, env_source="s 1", turns=(TURN,), rewards={"a": 1.0, "b": -1.0}, winners=("a",), ended="natural", reason="r"
)  # fmt: skip


def done(episode: Any) -> EpisodeDone:
    return EpisodeDone(episode_id="4.0", episode=encode(episode))


def changed(**changes: Any) -> Episode:
    return msgspec.structs.replace(EPISODE, **changes)


def with_turn(**changes: Any) -> Episode:
    return changed(turns=(msgspec.structs.replace(TURN, **changes),))


def test_a_sound_episode_is_believed_and_stored_as_checked() -> None:
    plain = msgspec.msgpack.decode(encode(EPISODE)) | {"smuggled": "x" * 1000}
    result = checked_result(LEASE, EpisodeDone(episode_id="4.0", episode=msgspec.msgpack.encode(plain)))
    assert isinstance(result, EpisodeResult)
    assert result.data == encode(EPISODE)


@pytest.mark.parametrize(
    ("episode", "says"),
    [
        (changed(match=make_match(5, pin=2)), "of match 5.0, not of the match 4.0"),
        (changed(match=make_match(4, pin=2, attempt=1)), "of match 4.1, not"),
        (changed(match=make_match(4, pin=2, turns=9)), "not of the match"),
        (changed(match=make_match(4, pin=3)), "not of the match"),
        (with_turn(spans=(Span(7, 0, 2),)), "was to play as version 2 but sampled with 7"),
        (with_turn(agent="agent-b"), "agent agent-b speaks for a"),
        (with_turn(seat="c"), "seat 'c' is not in the match"),
        (with_turn(logprobs=(-0.5, math.nan)), "not a finite number"),
        (with_turn(logprobs=(-0.5, -math.inf)), "not a finite number"),
        (with_turn(logprobs=(-0.5,)), "2 sampled tokens but 1 logprobs"),
        (with_turn(spans=(Span(2, 0, 1),)), "do not cover"),
        (changed(rewards={"a": math.inf, "b": 0.0}), "reward of a is inf"),
        (changed(rewards={"a": 1.0}), "seats are"),
        (changed(winners=("c",)), "not all seats"),
        ({"match": 3}, "not a valid message"),
        ([1, 2], "not a valid message"),
    ],
)
def test_what_a_worker_forges_is_put_aside_with_the_reason(episode: Any, says: str) -> None:
    result = checked_result(LEASE, done(episode))
    assert isinstance(result, FailedResult)
    assert (result.kind, result.reason, result.match) == ("invalid", "invalid", MATCH)
    assert says in result.message
    assert MATCH.env in result.message


def test_many_faults_are_counted_not_listed() -> None:
    result = checked_result(LEASE, done(changed(turns=(msgspec.structs.replace(TURN, seat="c"),) * 30)))
    assert isinstance(result, FailedResult)
    assert "(and " in result.message
    assert len(result.message) < 1000


@pytest.mark.parametrize(
    ("kind", "reason"), [("environment", "raised"), ("infrastructure", "engine"), ("cancelled", "cancelled")]
)
def test_failures_keep_their_words(kind: Any, reason: str) -> None:
    message = EpisodeFailed(episode_id="4.0", kind=kind, message="m", traceback="t")
    result = checked_result(LEASE, message)
    assert result == FailedResult(match=MATCH, kind=kind, reason=reason, message="m", traceback="t")


# ── leases ───────────────────────────────────────────────────────────────────────────────────────


def test_a_lease_is_held_then_delivered_then_acked() -> None:
    leases = Leases()
    leases.grant(MATCH, "w", 1.0)
    assert leases.standing("4.0", "w") == "held"
    assert leases.standing("4.0", "other") == "unknown"
    assert leases.num_held("w") == 1
    assert leases.deliver("4.0").match == MATCH
    assert leases.num_held("w") == 0
    assert leases.standing("4.0", "w") == "delivered"
    assert leases.standing("4.0", "other") == "unknown"
    assert leases.ack("4.0") == "w"
    assert leases.standing("4.0", "w") == "acked"
    assert leases.ack("4.0") is None


def test_one_attempt_is_played_once_at_a_time() -> None:
    leases = Leases()
    leases.grant(MATCH, "w", 1.0)
    with pytest.raises(ValueError, match=r"episode 4\.0 is already being played"):
        leases.grant(MATCH, "v", 1.0)
    leases.void("4.0")
    leases.grant(msgspec.structs.replace(MATCH, attempt=1), "v", 1.0)
    assert leases.standing("4.0", "w") == "unknown"


def test_reports_show_the_oldest_first_and_overdue_ones_are_found() -> None:
    leases = Leases()
    leases.grant(make_match(1, time_s=10.0), "w", 5.0)
    leases.grant(make_match(0, time_s=100.0), "v", 2.0)
    assert [(h.episode_id, h.worker, h.age_s) for h in leases.held(15.0)] == [("0.0", "v", 13.0), ("1.0", "w", 10.0)]
    assert leases.overdue(17.0, 2.0) == []
    assert [v.match.index for v in leases.overdue(17.1, 2.0)] == [1]


def test_old_acknowledgements_are_forgotten() -> None:
    leases = Leases()
    for i in range(5000):
        leases.ack(f"{i}.0")
    assert leases.standing("0.0", "w") == "unknown"
    assert leases.standing("4999.0", "w") == "acked"


# ── the board ────────────────────────────────────────────────────────────────────────────────────


def test_the_board_tells_who_has_the_loop(tmp_path: Path) -> None:
    board, seen = Board(tmp_path / "b", create=True), Board(tmp_path / "b", create=False)
    assert seen.read().running is None
    board.enter(7, 1)
    pulse = seen.read()
    assert pulse.running == "7.1"
    assert pulse.since == pulse.moved_at <= time.monotonic()
    board.leave()
    assert seen.read().running is None
    board.close()
    seen.close(remove=True)
    assert not (tmp_path / "b").exists()


def test_a_board_of_nonsense_counts_as_not_moving(tmp_path: Path) -> None:
    board = Board(tmp_path / "b", create=True)
    (tmp_path / "b").write_bytes(b"\xff" * 32)
    assert math.isnan(board.read().moved_at)
    board.close(remove=True)


def test_every_task_of_an_episode_is_seen_and_no_other(tmp_path: Path) -> None:
    board = Board(tmp_path / "b", create=True)
    running = lambda: board.read().running  # noqa: E731

    async def part() -> tuple[str | None, str | None]:
        before = running()
        await asyncio.sleep(0)
        return before, running()

    async def whole() -> Any:
        first = await part()
        return first, await asyncio.gather(part(), part())

    async def run() -> None:
        watch_tasks(asyncio.get_running_loop(), board)
        with episode(3, 0):
            inner = asyncio.create_task(whole())
        with episode(4, 1):
            other = asyncio.create_task(part())
        outside = asyncio.create_task(part())
        assert await inner == (("3.0", "3.0"), [("3.0", "3.0")] * 2)
        assert await other == ("4.1", "4.1")
        assert await outside == (None, None)
        assert running() is None

    asyncio.run(run())
    board.close(remove=True)


def test_watched_tasks_are_cancelled_and_fail_as_others_do(tmp_path: Path) -> None:
    board = Board(tmp_path / "b", create=True)
    cleaned: list[str] = []

    async def waits() -> None:
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            cleaned.append("here")
            raise

    async def fails() -> None:
        raise ValueError("as asked")

    async def run() -> None:
        watch_tasks(asyncio.get_running_loop(), board)
        with episode(1, 0):
            waiting, failing, unstarted = (asyncio.create_task(c()) for c in (waits, fails, waits))
            unstarted.cancel()
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        waiting.cancel()
        for task in (waiting, unstarted):
            with pytest.raises(asyncio.CancelledError):
                await task
        with pytest.raises(ValueError, match="as asked"):
            await failing
        with episode(1, 0), contextlib.suppress(TimeoutError):
            async with asyncio.timeout(0.01):
                await asyncio.create_task(waits())

    asyncio.run(run())
    assert cleaned == ["here", "here"]
    board.close(remove=True)


def test_the_environment_is_an_allow_list() -> None:
    full = {"PATH": "/bin", "LC_ALL": "C", "SECRET": "s", "SELFPLAY_API_KEY": "k", "HTTPS_PROXY": "p", "HOME": "/h"}
    assert set(scrubbed_environment(full, needs_api_key=False)) & set(full) == {"PATH", "LC_ALL", "HOME"}
    assert set(full) - set(scrubbed_environment(full, needs_api_key=True)) == {"SECRET"}
