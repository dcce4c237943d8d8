"""Causal attention over a packed row: every chain sees what it continues and itself, and nothing else.

Registered with transformers under `NAME`; the model hands ``chains`` through its keyword arguments. A model that does not,
or whose attention has a feature that is not computed here, is refused instead of being trained wrongly.
Sliding windows are honoured.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

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
    parts = [_attend_chain(chain, query, key, value, scaling, sliding_window) for chain in chains]
    whole = torch.cat(parts, 2) if len(parts) > 1 else parts[0]
    return whole.transpose(1, 2).contiguous(), None


def register() -> None:
    """Make `NAME` an ``attn_implementation`` of transformers; idempotent."""
    from transformers import AttentionInterface

    AttentionInterface.register(NAME, packed_attention)


def _attend_chain(
    chain: Chain, query: Tensor, key: Tensor, value: Tensor, scaling: float | None, window: int | None
) -> Tensor:
    """The chain's own tokens [1, H, L, D] over its context and itself."""
    places = (*chain.context, (chain.start, chain.end))
    keys, values = (_gather(t, places) for t in (key, value))
    return _attend(query[:, :, chain.start : chain.end], keys, values, scaling, window)


def _gather(x: Tensor, places: Sequence[tuple[int, int]]) -> Tensor:
    parts = [x[:, :, start:end] for start, end in places]
    return torch.cat(parts, 2) if len(parts) > 1 else parts[0]


def _attend(query: Tensor, key: Tensor, value: Tensor, scaling: float | None, window: int | None) -> Tensor:
    """The last L of K tokens: causal, and looking back at most ``window`` tokens where the layer has a window."""
    length, total, grouped = query.shape[2], key.shape[2], query.shape[1] != key.shape[1]
    if length == total and (window is None or total <= window):
        return F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scaling, enable_gqa=grouped)
    at = torch.arange(total, device=query.device)
    back = at[total - length :, None] - at[None, :]
    mask = back >= 0 if window is None else (back >= 0) & (back < window)
    return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scaling, enable_gqa=grouped)
