"""The corrected multi-adapter kernel for vLLM on a CPU.

vLLM's own CPU kernel computes rows of the base model (slot index −1) with the last slot's adapter whenever base and
adapter requests share a batch, and loops over rows. Here each linear layer's low-rank part is two dense products over
all rows: ``h = x Aᵀ`` for all slots and output slices at once, ``h`` times a 0/1 mask that keeps each row's own slot
(nothing for base rows), and ``y += h Bᵀ`` per output slice. The cost does not grow with the number of adapters in the
batch; a batch that one adapter has to itself takes just that slot.

For this the slots of a layer live in one block each for A [slices, slots, rank, in] and B [slots, rank, out] per slice;
vLLM's own tensors become views of them, so its loading of adapters works as before. Applied after the model is loaded,
on CPUs only, to the objects of one engine.
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

    def __init__(self, slots: Tensor, num_slots: int, rank: int, dtype: torch.dtype) -> None:
        """``slots`` [N]: the slot of each row, −1 for rows of the base model."""
        active = torch.unique(slots).tolist()
        self.is_base = active == [-1]
        self.only_slot: int | None = active[0] if len(active) == 1 and not self.is_base else None
        self._by_slices: dict[int, Tensor] = {}
        if self.only_slot is None and not self.is_base:
            own = slots[:, None] == torch.arange(num_slots)
            self._by_slices[1] = own.repeat_interleave(rank, dim=1).to(dtype)

    def for_slices(self, num_slices: int) -> Tensor:
        """[N, slices · slots · rank] of 0 and 1."""
        mask = self._by_slices.get(num_slices)
        if mask is None:
            mask = self._by_slices[num_slices] = self._by_slices[1].repeat(1, num_slices)
        return mask


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
    num_slices, num_slots, rank, _in = block.shape
    mask = wrapper.selfplay_mask
    if mask is None:
        mask = wrapper.selfplay_mask = StepMask(wrapper.token_lora_indices, num_slots, rank, block.dtype)
    if mask.is_base:
        return
    y, x = y.view(-1, y.shape[-1]), x.view(-1, x.shape[-1])
    if mask.only_slot is None:
        width = num_slots * rank
        hidden = (x @ block.view(num_slices * width, -1).t()).mul_(mask.for_slices(num_slices))
        sides = [b.view(width, -1) for b in lora_b_stacked.blocks]
    else:
        width = rank
        hidden = x @ block[:, mask.only_slot].reshape(num_slices * rank, -1).t()
        sides = [b[mask.only_slot] for b in lora_b_stacked.blocks]
    start = 0
    for i, (side, size) in enumerate(zip(sides, output_slices, strict=True)):
        y[:, start : start + size].addmm_(hidden[:, i * width : (i + 1) * width], side, alpha=scale)
        start += size
