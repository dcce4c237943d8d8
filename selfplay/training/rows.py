"""A packed row: the segments of one micro-batch as tensors, agent by agent.

In: `Segment`s. Out: one sequence of T tokens whose positions restart at each segment, and for the N action tokens the
positions whose hidden state predicts them, what was sampled, with which logprob and with which advantage.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby

import torch
from torch import Tensor

from selfplay.errors import TrainerError
from selfplay.training.lora import Run
from selfplay.types import Segment


@dataclass(frozen=True, kw_only=True)
class PackedRow:
    """One forward and backward pass. Actions are grouped by agent, in the order of ``runs``."""

    ids: Tensor
    """[1, T] long."""
    positions: Tensor
    """[1, T] long."""
    segment_lengths: tuple[int, ...]
    runs: tuple[Run, ...]
    """Whose tokens are where; covers [0, T)."""
    predicted_from: Tensor
    """[N] long: the token before each action."""
    targets: Tensor
    """[N] long: the action tokens."""
    rollout_logprobs: Tensor
    """[N] fp32, as recorded when they were sampled."""
    advantages: Tensor
    """[N] fp32."""
    actions: tuple[tuple[str, int, int], ...]
    """(agent, start, end) over [0, N)."""

    @property
    def num_tokens(self) -> int:
        return sum(self.segment_lengths)


def pack_row(segments: Sequence[Segment], device: torch.device) -> PackedRow:
    """Pack at least one segment. Raises `TrainerError` naming the episode of a segment that is not sound."""
    for segment in segments:
        _check(segment)
    ordered = sorted(segments, key=lambda s: s.agent)
    lengths = tuple(len(s.ids) for s in ordered)
    offsets = [0, *accumulate(lengths)]
    at = [(s, t, o + t) for s, o in zip(ordered, offsets, strict=False) for t, m in enumerate(s.mask) if m]

    def long(values: Sequence[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.long, device=device)

    def real(values: Sequence[float]) -> Tensor:
        return torch.tensor(values, dtype=torch.float32, device=device)

    return PackedRow(
        ids=long([i for s in ordered for i in s.ids])[None],
        positions=long([p for n in lengths for p in range(n)])[None],
        segment_lengths=lengths,
        runs=tuple(Run(a, i, j) for a, i, j in _spans([(s.agent, len(s.ids)) for s in ordered])),
        predicted_from=long([row - 1 for _, _, row in at]),
        targets=long([s.ids[t] for s, t, _ in at]),
        rollout_logprobs=real([s.logprobs[t] for s, t, _ in at]),
        advantages=real([s.advantages[t] for s, t, _ in at]),
        actions=_spans([(s.agent, s.num_actions) for s in ordered]),
    )


def teacher_forced(agent: str, ids: Sequence[int]) -> Segment:
    """A segment in which every token but the first is an action of ``agent``, without advantage."""
    zeros = (0.0,) * len(ids)
    return Segment(
        episode_id="", agent=agent, seat="", ids=tuple(ids), mask=(0, *(1,) * (len(ids) - 1)), logprobs=zeros,
        advantages=zeros, versions=(0, 0),
    )  # fmt: skip


def filler_row(agent: str, device: torch.device) -> PackedRow:
    """A row without actions: its gradient is zero, and it runs the same collectives as any other row."""
    return pack_row([teacher_forced(agent, [0])], device)


def _spans(sizes: Sequence[tuple[str, int]]) -> tuple[tuple[str, int, int], ...]:
    """Merge neighbours of one agent: (agent, start, end)."""
    out, start = [], 0
    for agent, group in groupby(sizes, key=lambda s: s[0]):
        end = start + sum(size for _, size in group)
        out.append((agent, start, end))
        start = end
    return tuple(out)


def _check(segment: Segment) -> None:
    where = f"segment of {segment.agent} in episode {segment.episode_id}"
    lengths = {len(segment.ids), len(segment.mask), len(segment.logprobs), len(segment.advantages)}
    if len(lengths) != 1 or not segment.ids:
        raise TrainerError(f"{where}: ids, mask, logprobs and advantages have {sorted(lengths)} entries")
    if segment.mask[0]:
        raise TrainerError(f"{where}: its first token is an action, sampled from nothing")
