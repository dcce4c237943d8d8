"""The plan of a step: every segment once and whole, rows within the limit, ranks balanced, always the same."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from selfplay.scoring.packing import num_distinct_tokens, plan_micro_batches, shared_prefix
from selfplay.types import Segment


def segment(agent: str, num_tokens: int, episode: int = 0, *, prefix: tuple[int, ...] = ()) -> Segment:
    """Tokens that no segment of another episode has, after ``prefix``."""
    ids = (*prefix, *range(1000 * episode, 1000 * episode + num_tokens - len(prefix)))
    zeros = (0.0,) * num_tokens
    return Segment(
        episode_id=f"{episode}.0", agent=agent, seat=agent, ids=ids, mask=(0,) * num_tokens,
        logprobs=zeros, advantages=zeros, versions=(0, 0),
    )  # fmt: skip


SEGMENTS = st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 120)), max_size=30).map(
    lambda sizes: [segment(agent, num, i) for i, (agent, num) in enumerate(sizes)]
)


@given(segments=SEGMENTS, ranks=st.integers(1, 4), max_tokens=st.integers(1, 100))
def test_every_segment_is_planned_once_and_whole(segments: list[Segment], ranks: int, max_tokens: int) -> None:
    plan = plan_micro_batches(segments, ranks=ranks, max_tokens=max_tokens)
    assert len(plan) == ranks
    assert len({len(rows) for rows in plan}) == 1
    planned = [s for rows in plan for row in rows for s in row]
    assert sorted(s.episode_id for s in planned) == sorted(s.episode_id for s in segments)
    assert all(s in segments for s in planned)
    for rows in plan:
        for row in rows:
            assert [s.agent for s in row] == sorted(s.agent for s in row)
            assert len(row) == 1 or sum(len(s.ids) for s in row) <= max_tokens


@given(segments=SEGMENTS, ranks=st.integers(1, 4))
def test_ranks_differ_by_at_most_the_longest_segment(segments: list[Segment], ranks: int) -> None:
    plan = plan_micro_batches(segments, ranks=ranks, max_tokens=64)
    loads = [sum(len(s.ids) for row in rows for s in row) for rows in plan]
    assert max(loads) - min(loads) <= max((len(s.ids) for s in segments), default=0)


@given(segments=SEGMENTS, ranks=st.integers(1, 3))
def test_the_same_segments_give_the_same_plan(segments: list[Segment], ranks: int) -> None:
    first = plan_micro_batches(segments, ranks=ranks, max_tokens=50)
    assert first == plan_micro_batches(list(segments), ranks=ranks, max_tokens=50)


def test_rows_are_filled_before_new_ones_are_begun() -> None:
    """Worked by hand: 60, 50, 40, 30, 20 into rows of 100 → 60 + 40 and 50 + 30 + 20, both full."""
    segments = [segment("a", n, i) for i, n in enumerate((20, 30, 40, 50, 60))]
    (rows,) = plan_micro_batches(segments, ranks=1, max_tokens=100)
    assert [sorted(len(s.ids) for s in row) for row in rows] == [[40, 60], [20, 30, 50]]


def test_a_segment_over_the_limit_has_a_row_of_its_own() -> None:
    segments = [segment("a", 500), segment("b", 10, 1), segment("b", 10, 2)]
    (rows,) = plan_micro_batches(segments, ranks=1, max_tokens=100)
    assert [[len(s.ids) for s in row] for row in rows] == [[500], [10, 10]]


def test_a_rank_without_work_gets_empty_rows() -> None:
    plan = plan_micro_batches([segment("a", 10)], ranks=3, max_tokens=100)
    assert [len(rows) for rows in plan] == [1, 1, 1]
    assert plan[1:] == (((),), ((),))


@pytest.mark.parametrize(("ranks", "max_tokens"), [(0, 10), (1, 0)])
def test_impossible_plans_are_refused(ranks: int, max_tokens: int) -> None:
    with pytest.raises(ValueError, match="at least 1"):
        plan_micro_batches([], ranks=ranks, max_tokens=max_tokens)


# ── what is shared is computed once ──────────────────────────────────────────────────────────────

RULES = tuple(range(5000, 5060))


@given(a=st.lists(st.integers(0, 2)), b=st.lists(st.integers(0, 2)))
def test_shared_prefix_is_where_they_part(a: list[int], b: list[int]) -> None:
    n = shared_prefix(a, b)
    assert a[:n] == b[:n]
    assert n == min(len(a), len(b)) or a[n] != b[n]


def test_segments_that_share_their_beginning_stay_in_one_row() -> None:
    """Eight of 80 tokens, 60 of them shared: 60 + 8 · 20 = 220 distinct tokens fit a row of 256; 640 would not."""
    segments = [segment("a", 80, i, prefix=RULES) for i in range(8)]
    assert num_distinct_tokens(segments) == 220
    (rows,) = plan_micro_batches(segments, ranks=1, max_tokens=256)
    assert [len(row) for row in rows] == [8]


def test_agents_share_nothing() -> None:
    """Their adapters differ, so the same tokens are computed for each."""
    segments = [segment(agent, 80, i, prefix=RULES) for agent in "ab" for i in range(2)]
    assert num_distinct_tokens(segments) == 2 * (60 + 2 * 20)


def test_the_same_game_many_times_is_computed_once() -> None:
    segments = [segment("a", 50, 3) for _ in range(100)]
    (rows,) = plan_micro_batches(segments, ranks=1, max_tokens=64)
    assert [len(row) for row in rows] == [100]


def test_sharing_does_not_starve_a_rank() -> None:
    """220 distinct tokens over two ranks: the rules are computed twice, 140 tokens each."""
    segments = [segment("a", 80, i, prefix=RULES) for i in range(8)]
    plan = plan_micro_batches(segments, ranks=2, max_tokens=4096)
    sizes = [num_distinct_tokens([s for row in rows for s in row]) for rows in plan]
    assert min(sizes) >= 100
    assert sum(len(row) for rows in plan for row in rows) == 8
