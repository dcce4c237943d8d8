"""Causal attention of a packed row: every segment sees itself alone.

Plugs into transformers through its attention interface. The lengths of the row's segments travel as the keyword
argument ``segment_lengths`` from the model's forward to each attention layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from selfplay.errors import TrainerError

NAME = "selfplay_packed"


def register() -> None:
    """Make ``attn_implementation="selfplay_packed"`` known to transformers; idempotent."""
    from transformers import AttentionInterface

    AttentionInterface.register(NAME, packed_attention)


def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,  # noqa: ARG001 (the interface's signature; packed rows have no padding)
    *,
    segment_lengths: Sequence[int] | None = None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """query [1, H, T, D], key and value [1, K, T, D] → [1, T, H, D]; ``segment_lengths`` sum to T."""
    if segment_lengths is None:
        raise TrainerError(f"{type(module).__name__} does not pass keyword arguments on to attention: not supported")
    grouped = query.shape[1] != key.shape[1]
    lengths = list(segment_lengths)
    parts = [
        F.scaled_dot_product_attention(
            q, k, v, attn_mask=(mask := _window(q, sliding_window)), is_causal=mask is None, scale=scaling,
            enable_gqa=grouped,
        )
        for q, k, v in zip(query.split(lengths, 2), key.split(lengths, 2), value.split(lengths, 2), strict=True)
    ]  # fmt: skip
    out = torch.cat(parts, 2) if len(parts) > 1 else parts[0]
    return out.transpose(1, 2).contiguous(), None


def _window(query: Tensor, size: int | None) -> Tensor | None:
    """Which keys a query may see [T, T] when the layer looks back at most ``size`` tokens; None where that is all."""
    length = query.shape[2]
    if size is None or length <= size:
        return None
    at = torch.arange(length, device=query.device)
    back = at[:, None] - at[None, :]
    return (back >= 0) & (back < size)
