"""Many adapters in one batch for a plain transformers model: each row of a batch goes through its own low-rank pair, or
through its own weights.

In: a loaded model and, per batch, which rows belong to which adapter. Out: the same model, whose target projections add
``x Aᵀ Bᵀ`` of each row's adapter, and whose modules have the weights of a version that is a whole model where a row belongs to
one. The base weights are never changed.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

from selfplay.errors import SyncError
from selfplay.wire.messages import BucketHeader

PEFT_PREFIX = "base_model.model."
Pair = tuple[Tensor, Tensor]
"""A [rank, in] and B [out, rank], the scale alpha / rank folded into B."""
Weights = dict[str, Tensor]
"""A module's parameters by name: instead of the base's, not beside them."""
Adapter = dict[str, Pair | Weights]
"""By module name."""


class AdapterBank:
    """The adapters of one model, and the rows of the batch that is being computed."""

    def __init__(self) -> None:
        self.adapters: dict[str, Adapter] = {}
        self.groups: list[tuple[Adapter, int, int]] = []
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


class Routed(nn.Module):
    """A frozen module that computes each group of rows with what their adapter has for it: a low-rank part beside its
    own weights, or weights instead of them."""

    def __init__(self, base: nn.Module, name: str, bank: AdapterBank) -> None:
        super().__init__()
        self.base, self.name, self._bank = base, name, bank

    def forward(self, x: Tensor) -> Tensor:
        """[B, ...] → [B, ...], row by row independent."""
        found = [(adapter.get(self.name), start, end) for adapter, start, end in self._bank.groups]
        whole = [(part, start, end) for part, start, end in found if isinstance(part, dict)]
        if whole and sum(end - start for _, start, end in whole) == len(x):
            parts = [_computed(self.base, weights, x[start:end]) for weights, start, end in whole]
            return parts[0] if len(parts) == 1 else torch.cat(parts)
        y: Tensor = self.base(x)
        for weights, start, end in whole:
            y[start:end] = _computed(self.base, weights, x[start:end])
        for part, start, end in found:
            if isinstance(part, tuple):
                y[start:end] += (x[start:end] @ part[0].t()) @ part[1].t()
        return y


def _computed(module: nn.Module, weights: Weights, x: Tensor) -> Tensor:
    """``module`` with other weights; the two most frequent kinds without the cost of swapping parameters."""
    if type(module) is nn.Linear:
        return F.linear(x, weights["weight"], weights.get("bias"))
    if type(module) is nn.Embedding and module.max_norm is None:
        return F.embedding(x, weights["weight"])
    out: Tensor = functional_call(module, dict(weights), (x,))
    return out


def install_routing(model: nn.Module, targets: Collection[str], *, whole: bool = False) -> AdapterBank:
    """Let every ``nn.Linear`` of ``model`` whose last name is in ``targets`` be routed, and with ``whole`` every module that has
    parameters of its own; returns the bank they read from."""
    bank = AdapterBank()
    found = [(n, m) for n, m in model.named_modules() if _is_routed(n, m, targets, whole)]
    for name, module in found:
        parent, _, last = name.rpartition(".")
        setattr(model.get_submodule(parent), last, Routed(module, name, bank))
    return bank


def _is_routed(name: str, module: nn.Module, targets: Collection[str], whole: bool) -> bool:
    if isinstance(module, nn.Linear) and name.rpartition(".")[2] in targets:
        return True
    return whole and next(module.children(), None) is None and next(module.parameters(), None) is not None


def parameter_shapes(model: nn.Module) -> dict[str, torch.Size]:
    """Name → shape of every parameter of a model before it is routed; one that is shared under each of its names."""
    return {name: p.shape for name, p in model.named_parameters(remove_duplicate=False)}


def build_adapter(
    tensors: dict[str, Tensor], header: BucketHeader, like: Tensor, shapes: Mapping[str, torch.Size]
) -> Adapter:
    """By module name out of PEFT tensors, in the dtype and on the device of ``like``.

    Raises `SyncError` for a whole model whose parameters are not those of ``shapes``, name by name.
    """
    if header.adapter_config.get("modules_to_save"):
        return _whole_model({n.removeprefix(PEFT_PREFIX): t for n, t in tensors.items()}, like, shapes)
    config: dict[str, Any] = dict(header.adapter_config)
    rank, alpha = int(config["r"]), float(config["lora_alpha"])
    scale = alpha / math.sqrt(rank) if config.get("use_rslora") else alpha / rank
    pairs: Adapter = {}
    for name, a in tensors.items():
        if name.endswith(".lora_A.weight"):
            module = name.removesuffix(".lora_A.weight")
            b = tensors[f"{module}.lora_B.weight"]
            pairs[module.removeprefix(PEFT_PREFIX)] = (_as(a, like), _as(b.float() * scale, like))
    return pairs


def _whole_model(tensors: Mapping[str, Tensor], like: Tensor, shapes: Mapping[str, torch.Size]) -> Adapter:
    odd = sorted(tensors.keys() ^ shapes.keys())
    if odd:
        where = "which the model does not have" if odd[0] in tensors else "and the model has it"
        raise SyncError(f"the version {'has' if odd[0] in tensors else 'lacks'} {odd[0]}, {where}")
    out: dict[str, Weights] = {}
    for name, tensor in tensors.items():
        if tensor.shape != shapes[name]:
            raise SyncError(f"{name} has the shape {tuple(tensor.shape)}, the model's has {tuple(shapes[name])}")
        module, _, last = name.rpartition(".")
        out.setdefault(module, {})[last] = _as(tensor, like)
    return dict(out)


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
