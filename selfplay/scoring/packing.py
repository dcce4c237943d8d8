"""Which rank computes which segments in which row: the plan of one optimizer step.

In: the step's segments. Out: for each rank the same number of micro-batches, each one packed row of at most
``max_tokens`` *distinct* tokens: what several segments of an agent begin with (rules, a shared history, the whole of a
game that was played twice) is computed once in a row, so segments that share stay together. Whole segments only: one
that is longer gets a row of its own, and it is never cut.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from selfplay.types import Segment

MicroBatch = tuple[Segment, ...]
Plan = tuple[tuple[MicroBatch, ...], ...]


@dataclass
class _Piece:
    """Segments of one agent that stay together, and how many distinct tokens they have."""

    segments: list[Segment] = field(default_factory=list)
    size: int = 0


def plan_micro_batches(segments: Sequence[Segment], *, ranks: int, max_tokens: int) -> Plan:
    """``plan[rank][k]``: the segments of the rank's k-th micro-batch, sorted by agent.

    Ranks get equal shares of distinct tokens as far as whole segments allow (largest first, to the emptiest rank). Rows
    go from full to empty, so that ranks which compute in step wait little for each other; a rank with fewer rows ends
    with empty ones. The same segments in the same order give the same plan.
    """
    if ranks < 1 or max_tokens < 1:
        raise ValueError(f"cannot plan for {ranks} ranks and rows of {max_tokens} tokens: both must be at least 1")
    pieces = sorted(_pieces(segments, ranks, max_tokens), key=lambda p: -p.size)
    shares = _balanced([p.size for p in pieces], ranks)
    rows = [_rows([pieces[i] for i in share], max_tokens) for share in shares]
    num_rows = max(len(r) for r in rows)
    return tuple((*r, *[()] * (num_rows - len(r))) for r in rows)


def shared_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    """How many tokens ``a`` and ``b`` begin with in common; compares slices, so it is quick on long tuples."""
    low, high = 0, min(len(a), len(b))
    while low < high:
        middle = (low + high + 1) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def num_distinct_tokens(segments: Sequence[Segment]) -> int:
    """Tokens that a row of ``segments`` computes: each prefix of an agent counts once."""
    return sum(_new_tokens(_in_order(segments)))


def _in_order(segments: Sequence[Segment]) -> list[Segment]:
    """By agent, then by tokens, so that neighbours share the most."""
    return sorted(segments, key=lambda s: (s.agent, s.ids))


def _new_tokens(ordered: Sequence[Segment]) -> list[int]:
    """For each segment, how many of its tokens its predecessors did not have."""
    if not ordered:
        return []
    new = [len(b.ids) - (shared_prefix(a.ids, b.ids) if a.agent == b.agent else 0) for a, b in pairwise(ordered)]
    return [len(ordered[0].ids), *new]


def _pieces(segments: Sequence[Segment], ranks: int, max_tokens: int) -> list[_Piece]:
    """Cut the ordered segments where little is shared, and where a piece would outgrow a row or a rank's fair share."""
    ordered = _in_order(segments)
    new_tokens = _new_tokens(ordered)
    limit = min(max_tokens, -(-sum(new_tokens) // ranks))
    pieces: list[_Piece] = []
    for segment, new in zip(ordered, new_tokens, strict=True):
        length = len(segment.ids)
        if not pieces or 2 * new > length or pieces[-1].size + new > limit:
            pieces.append(_Piece([segment], length))
        else:
            pieces[-1].segments.append(segment)
            pieces[-1].size += new
    return pieces


def _balanced(sizes: Sequence[int], ranks: int) -> list[list[int]]:
    """Indices of ``sizes`` (descending) per rank: each goes to the rank that has least so far."""
    shares: list[list[int]] = [[] for _ in range(ranks)]
    loads = [(0, rank) for rank in range(ranks)]
    for i, size in enumerate(sizes):
        load, rank = heapq.heappop(loads)
        shares[rank].append(i)
        heapq.heappush(loads, (load + size, rank))
    return shares


def _rows(pieces: Sequence[_Piece], max_tokens: int) -> list[MicroBatch]:
    """Pack pieces (largest first) into few rows, each into the fullest row that still has room; fullest row first."""
    rows: list[list[Segment]] = []
    room: list[int] = []
    for piece in pieces:
        fits = [k for k, left in enumerate(room) if left >= piece.size]
        if fits:
            best = min(fits, key=lambda k: (room[k], k))
            rows[best] += piece.segments
            room[best] -= piece.size
        else:
            rows.append(list(piece.segments))
            room.append(max_tokens - piece.size)
    order = sorted(range(len(rows)), key=lambda k: (room[k], k))
    return [tuple(sorted(rows[k], key=lambda s: s.agent)) for k in order]
