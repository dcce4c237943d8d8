"""Causal attention over a packed row: every segment sees itself only.

Registered with transformers under `NAME`; the model hands ``segment_lengths`` through its keyword arguments. A model that
does not, or whose attention has a feature that is not computed here, is refused instead of being trained wrongly.
Sliding windows are honoured.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from selfplay.errors import TrainerError

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
    segment_lengths: Sequence[int] | None = None,
    sliding_window: int | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """query [1, H, T, D], key and value [1, G, T, D] → [1, T, H, D]; ΣT of ``segment_lengths`` is T."""
    if segment_lengths is None or attention_mask is not None:
        raise TrainerError(f"{type(module).__name__} does not pass packed segments to its attention: cannot be trained")
    for name in _UNSUPPORTED:
        if options.get(name) is not None:
            raise TrainerError(
                f"{type(module).__name__} uses attention with {name}, which packed training does not compute"
            )
    lengths = list(segment_lengths)
    parts = [
        _attend(q, k, v, scaling, sliding_window)
        for q, k, v in zip(*(torch.split(t, lengths, 2) for t in (query, key, value)), strict=True)
    ]
    whole = torch.cat(parts, 2) if len(parts) > 1 else parts[0]
    return whole.transpose(1, 2).contiguous(), None


def register() -> None:
    """Make `NAME` an ``attn_implementation`` of transformers; idempotent."""
    from transformers import AttentionInterface

    AttentionInterface.register(NAME, packed_attention)


def _attend(query: Tensor, key: Tensor, value: Tensor, scaling: float | None, window: int | None) -> Tensor:
    """One segment: causal, and looking back at most ``window`` tokens where the layer has a window."""
    length, grouped = query.shape[2], query.shape[1] != key.shape[1]
    if window is None or length <= window:
        return F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scaling, enable_gqa=grouped)
    at = torch.arange(length, device=query.device)
    back = at[:, None] - at[None, :]
    mask = (back >= 0) & (back < window)
    return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scaling, enable_gqa=grouped)
