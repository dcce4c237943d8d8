"""The corrected multi-adapter kernel for vLLM on a CPU.

vLLM's own CPU kernel computes rows of the base model (slot index −1) with the last slot's adapter whenever base and
adapter requests share a batch, and copies an adapter's matrices once per row. Here each linear layer's low-rank part is
two dense products over all rows and the slots in use: ``h = x Aᵀ`` for the range of slots that have rows in the batch,
``h`` times a 0/1 mask that keeps each row's own slot (nothing for base rows), and ``y += h Bᵀ``, per output slice. The
cost grows with the adapters in the batch, not with its rows or with the slots that stand empty.

For this the slots of a layer live in one block each for A [slices, slots, rank, in] and B [slots, rank, out] per slice;
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
    """A side: [slices, slots, rank, in]."""
    blocks: tuple[Tensor, ...]
    """B side: per slice [slots, rank, out]."""


class StepMask:
    """Which rows of the present batch belong to which slot; made once per batch, used by every layer."""

    def __init__(self, slots: Tensor, rank: int, dtype: torch.dtype) -> None:
        """``slots`` [N]: the slot of each row, −1 for rows of the base model."""
        active = torch.unique(slots)
        used = active[active >= 0].tolist()
        self.is_base = not used
        self.first: int = used[0] if used else 0
        self.end: int = used[-1] + 1 if used else 0
        """The range of slots that have rows here; slots between two others are computed and masked away."""
        self.mask: Tensor | None = None
        """[N, (end − first) · rank] of 0 and 1; None when all rows are of one adapter."""
        if used and len(active) > 1:
            own = slots[:, None] == torch.arange(self.first, self.end)
            self.mask = own.repeat_interleave(rank, dim=1).to(dtype)


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
    block = torch.stack([a[:, 0] for a in old_a]).contiguous()
    blocks = tuple(b[:, 0].transpose(1, 2).contiguous() for b in old_b)
    layer.lora_a_stacked = a_side = _Slots(part.unsqueeze(1) for part in block)
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
            _fill(layer.lora_a_stacked.block[number, index], a)
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
    rank = block.shape[2]
    step: StepMask | None = wrapper.selfplay_mask
    if step is None:
        step = wrapper.selfplay_mask = StepMask(wrapper.token_lora_indices, rank, block.dtype)
    if step.is_base:
        return
    y, x = y.view(-1, y.shape[-1]), x.view(-1, x.shape[-1])
    width, start = (step.end - step.first) * rank, 0
    for a, b, size in zip(block, lora_b_stacked.blocks, output_slices, strict=True):
        hidden = x @ a[step.first : step.end].view(width, -1).t()
        if step.mask is not None:
            hidden *= step.mask
        y[:, start : start + size].addmm_(hidden, b[step.first : step.end].view(width, -1), alpha=scale)
        start += size
