"""A packed row: the segments of one micro-batch as tensors, agent by agent, each distinct prefix once.

In: `Segment`s. Out: one sequence of T tokens made of chains. A chain continues tokens that lie earlier in the row (the
beginning that its segment shares with others of the same agent) and is attended to by its own continuations only, so the
row is a trie of all segments and costs as many tokens as they have distinct prefixes. Of the M distinct action tokens the
row says which position predicts them; of the N sampled ones (an action that was sampled in several episodes counts each
time) which distinct action it is, with which logprob and with which advantage.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import groupby, pairwise
from typing import Literal

import torch
from torch import Tensor

from selfplay.errors import TrainerError
from selfplay.scoring.packing import shared_prefix
from selfplay.training.flat import Run
from selfplay.types import Segment

Kept = tuple[int, ...]
Slices = tuple[tuple[int, int], ...]
Length = Literal["token", "sequence", "constant"]


@dataclass(frozen=True)
class Chain:
    """Tokens ``[start, end)`` of a row, after the tokens of ``context`` (slices of the row, in order)."""

    start: int
    end: int
    context: Slices = ()


@dataclass(frozen=True, kw_only=True)
class PackedRow:
    """One forward and backward pass. Samples are grouped by agent, in the order of ``runs``."""

    ids: Tensor
    """[1, T] long."""
    positions: Tensor
    """[1, T] long."""
    chains: tuple[Chain, ...]
    """Cover [0, T) in order."""
    runs: tuple[Run, ...]
    """Whose tokens are where; covers [0, T)."""
    predicted_from: Tensor
    """[M] long: the token before each distinct action."""
    wanted: Tensor
    """[W] long, ascending: the tokens that predict any action, each once; in a row without actions the first token."""
    wanted_runs: tuple[Run, ...]
    """Whose they are; covers [0, W)."""
    targets: Tensor
    """[M] long: the distinct action tokens."""
    kept: Tensor | None
    """[M, K] long: the tokens that each was sampled among, −1 where there are fewer; None: all of the vocabulary, always.
    A first entry of −1 means all of it for this action."""
    picks: Tensor
    """[N] long: which of the M each sample is."""
    rollout_logprobs: Tensor
    """[N] fp32, as recorded when they were sampled."""
    advantages: Tensor
    """[N] fp32."""
    sequences: Tensor
    """[N] long: the number of each sample's segment in the row."""
    weights: Tensor
    """[N] fp32: share of its sequence's loss, before the agent's normaliser."""
    samples: tuple[tuple[str, int, int], ...]
    """(agent, start, end) over [0, N)."""

    @property
    def num_tokens(self) -> int:
        """Tokens computed, T."""
        return int(self.ids.shape[1])

    def actions_by_run(self) -> list[slice]:
        """Which of the M distinct actions are each run's."""
        ends = [0]
        for run in self.runs:
            mine = (self.predicted_from >= run.start) & (self.predicted_from < run.end)
            ends.append(ends[-1] + int(mine.sum()))
        return [slice(start, end) for start, end in pairwise(ends)]


@dataclass
class _Trie:
    """A row being built."""

    ids: list[int] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    chains: list[Chain] = field(default_factory=list)
    predicted_from: list[int] = field(default_factory=list)
    actions: dict[tuple[int, Kept], int] = field(default_factory=dict)
    """Position in the row of a distinct action, and what it was sampled among → its number."""

    def add(self, segment: Segment, shared: int, path: list[int]) -> list[int]:
        """Add what is new of a segment whose first ``shared`` tokens lie at ``path``; where all its tokens lie."""
        start, new = len(self.ids), segment.ids[shared:]
        if new:
            self.ids += new
            self.positions += range(shared, len(segment.ids))
            self.chains.append(Chain(start, len(self.ids), _slices(path[:shared])))
        return path[:shared] + list(range(start, len(self.ids)))

    def action(self, at: int, before: int, kept: Kept) -> int:
        """The number of the distinct action at position ``at``, which ``before`` predicts among ``kept``."""
        if (at, kept) not in self.actions:
            self.actions[at, kept] = len(self.predicted_from)
            self.predicted_from.append(before)
        return self.actions[at, kept]


def pack_row(
    segments: Sequence[Segment],
    device: torch.device,
    *,
    length: Length = "token",
    constant: float = 1.0,
    share: bool = True,
) -> PackedRow:
    """Pack at least one segment. Raises `TrainerError` naming the episode of a segment that is not sound.

    ``length`` says what a sample's weight is: ``token`` 1, ``sequence`` one over the actions of its segment, ``constant``
    one over ``constant``. Without ``share`` every segment is computed whole: the same results, for comparison.
    """
    for segment in segments:
        _check(segment)
    trie = _Trie()
    ordered = sorted(segments, key=lambda s: (s.agent, s.ids))
    runs, picks = [], list[int]()
    for agent, group in groupby(ordered, key=lambda s: s.agent):
        start = len(trie.ids)
        picks += _add_agent(trie, list(group), share)
        runs.append(Run(agent, start, len(trie.ids)))
    return _tensors(trie, ordered, runs, picks, device, length, constant)


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


def _add_agent(trie: _Trie, ordered: Sequence[Segment], share: bool) -> list[int]:
    """Add one agent's segments, sorted by ids; the number of the distinct action of each of their samples."""
    path, before = list[int](), tuple[int, ...]()
    picks = []
    for segment in ordered:
        if segment.ids != before or not share:
            path = trie.add(segment, shared_prefix(before, segment.ids) if share else 0, path)
            before = segment.ids
        at = [t for t, m in enumerate(segment.mask) if m]
        kept = segment.kept or [()] * len(at)
        picks += [trie.action(path[t], path[t - 1], k) for t, k in zip(at, kept, strict=True)]
    return picks


def _tensors(
    trie: _Trie, ordered: Sequence[Segment], runs: Sequence[Run], picks: Sequence[int], device: torch.device,
    length: Length, constant: float,
) -> PackedRow:  # fmt: skip
    at = [(n, s, t) for n, s in enumerate(ordered) for t, m in enumerate(s.mask) if m]
    wanted = sorted(set(trie.predicted_from)) or [0]

    def long(values: Sequence[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.long, device=device)

    def real(values: Sequence[float]) -> Tensor:
        return torch.tensor(values, dtype=torch.float32, device=device)

    return PackedRow(
        ids=long(trie.ids)[None],
        positions=long(trie.positions)[None],
        chains=tuple(trie.chains),
        runs=tuple(runs),
        predicted_from=long(trie.predicted_from),
        wanted=long(wanted),
        wanted_runs=tuple(Run(r.agent, bisect_left(wanted, r.start), bisect_left(wanted, r.end)) for r in runs),
        targets=long([trie.ids[position] for position, _ in trie.actions]),
        kept=_kept([kept for _, kept in trie.actions], device),
        picks=long(picks),
        rollout_logprobs=real([s.logprobs[t] for _, s, t in at]),
        advantages=real([s.advantages[t] for _, s, t in at]),
        sequences=long([n for n, _, _ in at]),
        weights=real([w for s in ordered for w in [_weight(s, length, constant)] * s.num_actions]),
        samples=_spans([(s.agent, s.num_actions) for s in ordered]),
    )


def _kept(sets: Sequence[Kept], device: torch.device) -> Tensor | None:
    width = max(map(len, sets), default=0)
    if not width:
        return None
    return torch.tensor([(*s, *(-1,) * (width - len(s))) for s in sets], dtype=torch.long, device=device)


def _weight(segment: Segment, length: Length, constant: float) -> float:
    if length == "token" or not segment.num_actions:
        return 1.0
    return 1.0 / segment.num_actions if length == "sequence" else 1.0 / constant


def _slices(path: Sequence[int]) -> Slices:
    """Positions as slices of the row: runs of neighbours."""
    out: list[tuple[int, int]] = []
    for at in path:
        if out and out[-1][1] == at:
            out[-1] = (out[-1][0], at + 1)
        else:
            out.append((at, at + 1))
    return tuple(out)


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
    if segment.kept and len(segment.kept) != segment.num_actions:
        raise TrainerError(
            f"{where}: {segment.num_actions} actions, but {len(segment.kept)} sets they were sampled among"
        )
