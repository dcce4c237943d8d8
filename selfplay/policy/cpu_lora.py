"""The corrected multi-adapter kernel for vLLM on a CPU.

vLLM's own CPU kernel computes rows of the base model (slot index −1) with the last slot's adapter whenever base and
adapter requests share a batch, and copies an adapter's matrices once per row. Here each linear layer's low-rank part is
dense products over all rows and the slots in use: ``h = x Aᵀ`` for the range of slots that have rows in the batch and all
output slices at once, ``h`` times a 0/1 mask that keeps each row's own slot (nothing for base rows), and ``y += h Bᵀ`` per
slice. The cost grows with the adapters in the batch, not with its rows or with the slots that stand empty.

A bfloat16 product has a price of its own, about 20 µs, before it multiplies anything; a float32 product a tenth of that.
So where rows and matrices are few, as in the answers of a handful of games, both are computed in float32.

For this the slots of a layer live in one block each for A [slots, slices, rank, in] and B [slots, rank, out] per slice;
vLLM's own tensors become views of them. An adapter is put into its slot by one copy per matrix; vLLM clears the whole slot
first. Applied after the model is loaded, on CPUs only, to the objects of one engine.
"""

from __future__ import annotations

from types import MethodType
from typing import Any

import torch
from torch import Tensor


class _Slots(tuple[Tensor, ...]):
    """vLLM's tuple of per-slice tensors, with the blocks they are views of."""

    block: Tensor
    """A side: [slots, slices, rank, in]."""
    blocks: tuple[Tensor, ...]
    """B side: per slice [slots, rank, out]."""


FEW_ROWS, SMALL_MATRIX = 16, 1 << 16
"""Up to so many rows and elements a float32 product is cheaper than a bfloat16 one, conversions included."""


class StepMask:
    """Which rows of the present batch belong to which slot; made once per batch, used by every layer."""

    def __init__(self, slots: Tensor) -> None:
        """``slots`` [N]: the slot of each row, −1 for rows of the base model."""
        active = torch.unique(slots)
        used = active[active >= 0].tolist()
        self.is_base = not used
        self.first: int = used[0] if used else 0
        self.end: int = used[-1] + 1 if used else 0
        """The range of slots that have rows here; slots between two others are computed and masked away."""
        self.mask: Tensor | None = None
        """[N, end − first, 1] of 0 and 1; None when all rows are of one adapter."""
        if used and len(active) > 1:
            self.mask = (slots[:, None] == torch.arange(self.first, self.end)).float().unsqueeze(-1)


def apply(manager: Any) -> int:
    """Give every adapter layer of a vLLM ``LoRAModelManager`` the corrected kernel; how many layers there were."""
    layers = [m for m in manager.modules.values() if hasattr(m, "output_slices")]
    for layer in layers:
        _rearrange(layer)
    for wrapper in {id(layer.punica_wrapper): layer.punica_wrapper for layer in layers}.values():
        wrapper.selfplay_mask = None
        wrapper.update_metadata = MethodType(_updating(type(wrapper).update_metadata), wrapper)
        wrapper.add_lora_linear = MethodType(_add_lora_linear, wrapper)
    return len(layers)


def _rearrange(layer: Any) -> None:
    """Move the layer's slots into blocks, keeping what they hold."""
    old_a, old_b = layer.lora_a_stacked, layer.lora_b_stacked
    block = torch.stack([a[:, 0] for a in old_a], dim=1)
    blocks = tuple(b[:, 0].transpose(1, 2).contiguous() for b in old_b)
    layer.lora_a_stacked = a_side = _Slots(block[:, k : k + 1] for k in range(len(old_a)))
    a_side.block = block
    layer.lora_b_stacked = b_side = _Slots(part.transpose(1, 2).unsqueeze(1) for part in blocks)
    b_side.blocks = blocks
    if layer.tp_size == 1:  # otherwise vLLM cuts the matrices first
        layer.set_lora = MethodType(_setting(layer.set_lora), layer)


def _setting(original: Any) -> Any:
    """``set_lora`` for adapters with one pair of matrices, or none, per slice; vLLM's own for all others."""

    def set_lora(
        layer: Any, index: int, lora_a: Tensor | list[Tensor | None], lora_b: Tensor | list[Tensor | None]
    ) -> None:
        a_parts, b_parts = _parts(lora_a), _parts(lora_b)
        if not len(a_parts) == len(b_parts) == layer.n_slices:
            original(index, lora_a, lora_b)
            return
        for number, (a, b) in enumerate(zip(a_parts, b_parts, strict=True)):
            _fill(layer.lora_a_stacked.block[index, number], a)
            _fill(layer.lora_b_stacked.blocks[number][index], None if b is None else b.t())

    return set_lora


def _parts(matrices: Tensor | list[Tensor | None]) -> list[Tensor | None]:
    return [matrices] if isinstance(matrices, Tensor) else matrices


def _fill(slot: Tensor, matrix: Tensor | None) -> None:
    """``matrix`` [r, n] into ``slot`` [rank ≥ r, n], zeros below."""
    rank = 0 if matrix is None else len(matrix)
    if matrix is not None:
        slot[:rank].copy_(matrix)
    if rank < len(slot):
        slot[rank:].zero_()


def _updating(original: Any) -> Any:
    """``update_metadata`` that also forgets the mask of the batch before."""

    def update_metadata(wrapper: Any, *args: Any, **kwargs: Any) -> None:
        wrapper.selfplay_mask = None
        original(wrapper, *args, **kwargs)

    return update_metadata


def _add_lora_linear(
    wrapper: Any,
    y: Tensor,
    x: Tensor,
    lora_a_stacked: _Slots,
    lora_b_stacked: _Slots,
    scale: float,
    output_slices: tuple[int, ...],
    **_: Any,
) -> None:
    """``y`` [N, out] += scale · x Aᵀ Bᵀ with each row's own adapter, in place."""
    block = lora_a_stacked.block
    step: StepMask | None = wrapper.selfplay_mask
    if step is None:
        step = wrapper.selfplay_mask = StepMask(wrapper.token_lora_indices)
    if step.is_base:
        return
    y, x = y.view(-1, y.shape[-1]), x.view(-1, x.shape[-1])
    slices, rank, width = block.shape[1:]
    used, start = step.end - step.first, 0
    hidden = _product(x, block[step.first : step.end].view(-1, width).t())
    parts = hidden.view(-1, used, slices, rank).permute(2, 0, 1, 3)
    if step.mask is not None:
        parts = torch.mul(parts, step.mask, out=parts.new_empty(parts.shape))
    for part, b, size in zip(parts, lora_b_stacked.blocks, output_slices, strict=True):
        matrix = b[step.first : step.end].view(used * rank, -1)
        _add_product(y[:, start : start + size], part.reshape(-1, used * rank), matrix, scale)
        start += size


def _is_small(x: Tensor, matrix: Tensor) -> bool:
    return matrix.dtype != torch.float32 and len(x) <= FEW_ROWS and matrix.numel() <= SMALL_MATRIX


def _product(x: Tensor, matrix: Tensor) -> Tensor:
    """``x`` [N, in] times ``matrix`` [in, n]; float32 where that is cheaper."""
    return x.float() @ matrix.float() if _is_small(x, matrix) else x @ matrix


def _add_product(y: Tensor, x: Tensor, matrix: Tensor, scale: float) -> None:
    """``y`` [N, out] += scale · ``x`` [N, n] times ``matrix`` [n, out], in place."""
    if _is_small(x, matrix):
        y.add_(x.float() @ matrix.float(), alpha=scale)
    else:
        y.addmm_(x.to(matrix.dtype), matrix, alpha=scale)
