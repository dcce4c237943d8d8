"""Segments → one packed row of tensors, with the agents' tokens and actions as contiguous ranges.

    ids        │ segment of a │ segment of a │ segment of b │        [T]
    positions  │ 0 1 2 …      │ 0 1 2 …      │ 0 1 2 …      │        [T]
    actions: for each action token t the hidden state at t − 1 predicts ids[t]

An action's context is exactly what precedes it in its own segment. Only action tokens reach the loss.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import groupby

import torch
from torch import Tensor

from selfplay.errors import TrainerError
from selfplay.types import Segment


@dataclass(frozen=True, kw_only=True)
class Row:
    """One packed row of T tokens with N actions."""

    ids: Tensor
    """[T] int64."""
    positions: Tensor
    """[T] int64, from 0 in each segment."""
    lengths: tuple[int, ...]
    """Of the segments; they sum to T."""
    tokens: dict[str, tuple[int, int]]
    """Agent → its range of tokens; sorted, they tile the row."""
    actions: dict[str, tuple[int, int]]
    """Agent → its range of actions."""
    predictors: Tensor
    """[N] index of the token before each action."""
    targets: Tensor
    """[N] the action tokens."""
    rollout_logprobs: Tensor
    """[N] float32, as sampled."""
    advantages: Tensor
    """[N] float32."""


def pack_row(segments: Sequence[Segment], agents: Collection[str], *, device: torch.device, vocab_size: int) -> Row | None:
    """The row of those ``segments`` that belong to ``agents``, sorted by agent; None when there is none.

    Raises `TrainerError` naming the episode for a token the model does not have, and for an action without context.
    """
    chosen = sorted((s for s in segments if s.agent in agents), key=lambda s: s.agent)
    if not chosen:
        return None
    ids: list[int] = []
    positions: list[int] = []
    predictors: list[int] = []
    logprobs: list[float] = []
    advantages: list[float] = []
    tokens, actions = {}, {}
    for agent, group in groupby(chosen, key=lambda s: s.agent):
        first_token, first_action = len(ids), len(predictors)
        for segment in group:
            _check(segment, vocab_size)
            at = [t for t, is_action in enumerate(segment.mask) if is_action]
            predictors += [len(ids) + t - 1 for t in at]
            logprobs += [segment.logprobs[t] for t in at]
            advantages += [segment.advantages[t] for t in at]
            ids += segment.ids
            positions += range(len(segment.ids))
        tokens[agent], actions[agent] = (first_token, len(ids)), (first_action, len(predictors))
    all_ids = torch.tensor(ids, device=device)
    before = torch.tensor(predictors, dtype=torch.int64, device=device)
    return Row(
        ids=all_ids, positions=torch.tensor(positions, device=device), lengths=tuple(len(s.ids) for s in chosen),
        tokens=tokens, actions=actions, predictors=before, targets=all_ids[before + 1],
        rollout_logprobs=torch.tensor(logprobs, dtype=torch.float32, device=device),
        advantages=torch.tensor(advantages, dtype=torch.float32, device=device),
    )  # fmt: skip


def forced_row(agent: str, ids: Sequence[int], *, device: torch.device, vocab_size: int) -> Row:
    """A row of one sequence in which every token after the first is an action without advantage: teacher forcing."""
    num = len(ids)
    segment = Segment(
        episode_id="probe", agent=agent, seat="", ids=tuple(ids), mask=(0, *[1] * (num - 1)), logprobs=(0.0,) * num,
        advantages=(0.0,) * num, versions=(0, 0),
    )  # fmt: skip
    row = pack_row([segment], {agent}, device=device, vocab_size=vocab_size)
    if row is None or num < 2:
        raise TrainerError(f"a probe needs at least 2 tokens, not {num}")
    return row


def idle_row(agent: str, *, device: torch.device) -> Row:
    """One token and no action: keeps a rank in step with the collectives of a sharded base, and adds a zero gradient."""
    segment = Segment(
        episode_id="idle", agent=agent, seat="", ids=(0,), mask=(0,), logprobs=(0.0,), advantages=(0.0,), versions=(0, 0)
    )
    row = pack_row([segment], {agent}, device=device, vocab_size=1)
    assert row is not None  # it has just been given a segment
    return row


def _check(segment: Segment, vocab_size: int) -> None:
    where = f"segment of {segment.agent} in episode {segment.episode_id}"
    lengths = {len(segment.ids), len(segment.mask), len(segment.logprobs), len(segment.advantages)}
    if len(lengths) != 1 or not segment.ids:
        raise TrainerError(f"{where}: ids, mask, logprobs and advantages have {sorted(lengths)} entries")
    if max(segment.ids) >= vocab_size:
        raise TrainerError(f"{where}: token {max(segment.ids)} is outside the model's vocabulary of {vocab_size}")
    if segment.mask[0]:
        raise TrainerError(f"{where}: its first token is an action, sampled from nothing")
