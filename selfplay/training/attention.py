"""Causal attention over a packed row: every segment sees itself only.

Registered with transformers under `NAME`; the model hands ``segment_lengths`` through its keyword arguments. A model that
does not, or whose attention has a feature that is not computed here, is refused instead of being trained wrongly.
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
    **options: Any,
) -> tuple[Tensor, None]:
    """query [1, H, T, D], key and value [1, G, T, D] → [1, T, H, D]; ΣT of ``segment_lengths`` is T."""
    if segment_lengths is None or attention_mask is not None:
        raise TrainerError(f"{type(module).__name__} does not pass packed segments to its attention: cannot be trained")
    _check_options(module, options, max(segment_lengths))
    lengths = list(segment_lengths)
    grouped = query.shape[1] != key.shape[1]
    parts = [
        F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scaling, enable_gqa=grouped)
        for q, k, v in zip(query.split(lengths, 2), key.split(lengths, 2), value.split(lengths, 2), strict=True)
    ]
    whole = torch.cat(parts, 2) if len(parts) > 1 else parts[0]
    return whole.transpose(1, 2).contiguous(), None


def register() -> None:
    """Make `NAME` an ``attn_implementation`` of transformers; idempotent."""
    from transformers import AttentionInterface

    AttentionInterface.register(NAME, packed_attention)


def _check_options(module: nn.Module, options: dict[str, Any], longest: int) -> None:
    for name in _UNSUPPORTED:
        if options.get(name) is not None:
            raise TrainerError(f"{type(module).__name__} uses attention with {name}, which packed training does not compute")
    window = options.get("sliding_window")
    if window is not None and longest > window:
        raise TrainerError(
            f"a segment of {longest} tokens is longer than the attention window of {window} tokens of "
            f"{type(module).__name__}; set policy.max_model_len to at most {window}"
        )
