"""Many adapters in one batch for a plain transformers model: each row of a batch goes through its own low-rank pair.

In: a loaded model and, per batch, which rows belong to which adapter. Out: the same model, whose target projections add
``x Aᵀ Bᵀ`` of each row's adapter. The base weights are never changed.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from selfplay.wire.messages import BucketHeader

Pair = tuple[Tensor, Tensor]
"""A [rank, in] and B [out, rank], the scale alpha / rank folded into B."""


class AdapterBank:
    """The adapters of one model, and the rows of the batch that is being computed."""

    def __init__(self) -> None:
        self.adapters: dict[str, dict[str, Pair]] = {}
        self.groups: list[tuple[dict[str, Pair], int, int]] = []
        """(adapter, first row, end row) of the present batch; rows of the base model are in no group."""

    def route(self, names: Sequence[str | None]) -> None:
        """Say which adapter each row of the next batch has; equal names must be adjacent to be computed together."""
        self.groups, start = [], 0
        for end in range(1, len(names) + 1):
            if end == len(names) or names[end] != names[start]:
                name = names[start]
                if name is not None:
                    self.groups.append((self.adapters[name], start, end))
                start = end


class RoutedLinear(nn.Module):
    """A frozen projection with a low-rank part per row group."""

    def __init__(self, base: nn.Linear, name: str, bank: AdapterBank) -> None:
        super().__init__()
        self.base, self.name, self._bank = base, name, bank

    def forward(self, x: Tensor) -> Tensor:
        """[B, T, in] → [B, T, out]."""
        y: Tensor = self.base(x)
        for adapter, start, end in self._bank.groups:
            pair = adapter.get(self.name)
            if pair is not None:
                y[start:end] += (x[start:end] @ pair[0].t()) @ pair[1].t()
        return y


def install_routing(model: nn.Module, targets: Collection[str]) -> AdapterBank:
    """Replace every ``nn.Linear`` of ``model`` whose last name is in ``targets``; returns the bank they read from."""
    bank = AdapterBank()
    found = [(n, m) for n, m in model.named_modules() if isinstance(m, nn.Linear) and n.rpartition(".")[2] in targets]
    for name, module in found:
        parent, _, last = name.rpartition(".")
        setattr(model.get_submodule(parent), last, RoutedLinear(module, name, bank))
    return bank


def build_adapter(tensors: dict[str, Tensor], header: BucketHeader, like: Tensor) -> dict[str, Pair]:
    """Pairs by module name out of PEFT tensors, in the dtype and on the device of ``like``."""
    config: dict[str, Any] = dict(header.adapter_config)
    rank, alpha = int(config["r"]), float(config["lora_alpha"])
    scale = alpha / math.sqrt(rank) if config.get("use_rslora") else alpha / rank
    pairs: dict[str, Pair] = {}
    for name, a in tensors.items():
        if name.endswith(".lora_A.weight"):
            module = name.removesuffix(".lora_A.weight")
            b = tensors[f"{module}.lora_B.weight"]
            pairs[module.removeprefix("base_model.model.")] = (_as(a, like), _as(b.float() * scale, like))
    return pairs


def _as(tensor: Tensor, like: Tensor) -> Tensor:
    return tensor.to(device=like.device, dtype=like.dtype, copy=True)


@torch.inference_mode()
def chosen_logprobs(logits: Tensor, tokens: Tensor) -> Tensor:
    """Log-probabilities [N] of ``tokens`` [N] under ``logits`` [N, V], in float32, a few rows at a time."""
    parts = [
        torch.log_softmax(rows.float(), dim=-1).gather(1, wanted[:, None])[:, 0]
        for rows, wanted in zip(torch.split(logits, 256), torch.split(tokens, 256), strict=True)
    ]
    return torch.cat(parts)
