"""Causal attention over a packed row: every chain sees what it continues and itself, and nothing else.

Registered with transformers under `NAME`; the model hands ``chains`` through its keyword arguments. A model that does not,
or whose attention has a feature that is not computed here, is refused instead of being trained wrongly.
Sliding windows are honoured.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from selfplay.errors import TrainerError
from selfplay.training.rows import Chain

NAME = "selfplay_packed"
_UNSUPPORTED = ("softcap", "s_aux", "head_mask")


def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    chains: Sequence[Chain] | None = None,
    sliding_window: int | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """query [1, H, T, D], key and value [1, G, T, D] → [1, T, H, D]; ``chains`` cover [0, T)."""
    if chains is None or attention_mask is not None:
        raise TrainerError(f"{type(module).__name__} does not pass packed segments to its attention: cannot be trained")
    for name in _UNSUPPORTED:
        if options.get(name) is not None:
            raise TrainerError(
                f"{type(module).__name__} uses attention with {name}, which packed training does not compute"
            )
    layout = _layout(tuple(chains), query.device)
    parts = [
        _attend(q, k, v, scaling, sliding_window)
        for q, k, v in zip(
            _batches(query, layout.queries, [(g.num, g.length) for g in layout.groups]),
            _batches(key, layout.keys, [(g.num, g.total) for g in layout.groups]),
            _batches(value, layout.keys, [(g.num, g.total) for g in layout.groups]),
            strict=True,
        )
    ]
    grouped = torch.cat([p.transpose(1, 2).flatten(0, 1) for p in parts])  # [T, H, D], group after group
    return _rows(grouped, layout.back)[None], None


def register() -> None:
    """Make `NAME` an ``attn_implementation`` of transformers; idempotent."""
    from transformers import AttentionInterface

    AttentionInterface.register(NAME, packed_attention)


class _Group(NamedTuple):
    """Chains of one shape, which are attended to in one call."""

    num: int
    length: int
    """Own tokens of each."""
    total: int
    """Own tokens and those of its context."""


@dataclass(frozen=True)
class _Layout:
    """A row's chains group by group: where each group's tokens lie in the row, T in all."""

    groups: tuple[_Group, ...]
    queries: Tensor
    """[T] long: own tokens."""
    keys: Tensor
    """[sum of num × total] long: context and own tokens of each chain."""
    back: Tensor
    """[T] long: where the row's tokens lie in ``queries``."""


@lru_cache(maxsize=16)
def _layout(chains: tuple[Chain, ...], device: torch.device) -> _Layout:
    """The same for all layers of a row, so it is kept. A slice per chain would be simpler, but the gradient of each slice is
    a tensor as long as the row: with hundreds of short chains that costs more than the model."""
    by_shape: dict[tuple[int, int], list[Chain]] = {}
    for chain in chains:
        length = chain.end - chain.start
        by_shape.setdefault((length, length + sum(b - a for a, b in chain.context)), []).append(chain)
    ordered = [chain for alike in by_shape.values() for chain in alike]
    queries = [at for c in ordered for at in range(c.start, c.end)]
    keys = [at for c in ordered for a, b in (*c.context, (c.start, c.end)) for at in range(a, b)]
    where = torch.tensor(queries, dtype=torch.long, device=device)
    return _Layout(
        groups=tuple(_Group(len(alike), *shape) for shape, alike in by_shape.items()), queries=where,
        keys=torch.tensor(keys, dtype=torch.long, device=device), back=where.argsort(),
    )  # fmt: skip


def _batches(x: Tensor, index: Tensor, shapes: Sequence[tuple[int, int]]) -> list[Tensor]:
    """x [1, H, T, D] at ``index``, as one [num, H, length, D] for each (num, length) of ``shapes``."""
    parts = _rows(x[0].transpose(0, 1), index).split([num * length for num, length in shapes])
    return [p.unflatten(0, shape).transpose(1, 2) for p, shape in zip(parts, shapes, strict=True)]


def _rows(x: Tensor, index: Tensor) -> Tensor:
    """x [T, H, D] → [index, H, D]: as an embedding, whose gradient adds whole rows and so is the quickest of its kind."""
    rows: Tensor = F.embedding(index, x.flatten(1)).unflatten(1, x.shape[1:])
    return rows


def _attend(query: Tensor, key: Tensor, value: Tensor, scaling: float | None, window: int | None) -> Tensor:
    """[n, H, L, D] over [n, G, K, D], the last L of K tokens: causal, and looking back at most ``window`` tokens where the layer has a window."""
    length, total, grouped = query.shape[2], key.shape[2], query.shape[1] != key.shape[1]
    if length == total and (window is None or total <= window):
        return F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scaling, enable_gqa=grouped)
    at = torch.arange(total, device=query.device)
    back = at[total - length :, None] - at[None, :]
    mask = back >= 0 if window is None else (back >= 0) & (back < window)
    return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scaling, enable_gqa=grouped)
