"""Which rank computes which segments in which row: the plan of one optimizer step.

In: the step's segments. Out: for each rank the same number of micro-batches, each one packed row of at most
``max_tokens`` tokens. Whole segments only: one that is longer gets a row of its own, and it is never cut.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from selfplay.types import Segment

MicroBatch = tuple[Segment, ...]
Plan = tuple[tuple[MicroBatch, ...], ...]


def plan_micro_batches(segments: Sequence[Segment], *, ranks: int, max_tokens: int) -> Plan:
    """``plan[rank][k]``: the segments of the rank's k-th micro-batch, sorted by agent.

    Ranks get equal shares of tokens as far as whole segments allow (longest first, to the emptiest rank). Rows go from
    full to empty, so that ranks which compute in step wait little for each other; a rank with fewer rows ends with empty
    ones. The same segments in the same order give the same plan.
    """
    if ranks < 1 or max_tokens < 1:
        raise ValueError(f"cannot plan for {ranks} ranks and rows of {max_tokens} tokens: both must be at least 1")
    longest_first = sorted(range(len(segments)), key=lambda i: (-len(segments[i].ids), i))
    shares = _balanced([len(segments[i].ids) for i in longest_first], ranks)
    rows = [_rows([segments[longest_first[i]] for i in share], max_tokens) for share in shares]
    num_rows = max(len(r) for r in rows)
    return tuple((*r, *[()] * (num_rows - len(r))) for r in rows)


def _balanced(sizes: Sequence[int], ranks: int) -> list[list[int]]:
    """Indices of ``sizes`` (descending) per rank: each goes to the rank that has least so far."""
    shares: list[list[int]] = [[] for _ in range(ranks)]
    loads = [(0, rank) for rank in range(ranks)]
    for i, size in enumerate(sizes):
        load, rank = heapq.heappop(loads)
        shares[rank].append(i)
        heapq.heappush(loads, (load + size, rank))
    return shares


def _rows(segments: Sequence[Segment], max_tokens: int) -> list[MicroBatch]:
    """Pack segments (longest first) into few rows, each into the fullest row that still has room; fullest row first."""
    rows: list[list[Segment]] = []
    room: list[int] = []
    for segment in segments:
        size = len(segment.ids)
        fits = [k for k, left in enumerate(room) if left >= size]
        if fits:
            best = min(fits, key=lambda k: (room[k], k))
            rows[best].append(segment)
            room[best] -= size
        else:
            rows.append([segment])
            room.append(max_tokens - size)
    order = sorted(range(len(rows)), key=lambda k: (room[k], k))
    return [tuple(sorted(rows[k], key=lambda s: s.agent)) for k in order]
