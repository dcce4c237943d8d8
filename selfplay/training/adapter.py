"""One agent's LoRA adapter as one flat float32 parameter.

    layout (projections of the base model)  ─►  FlatAdapter.flat [P]  ─►  views A [r, in], B [out, r] per projection
                                                                     └─►  tensors by PEFT name (store, engines)

One parameter per agent keeps optimizer, gradient clip, all-reduce and checkpoint a single operation each.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from selfplay.config import LoraConfig
from selfplay.errors import TrainerError
from selfplay.types import Scalar, derive_seed

PEFT_PREFIX = "base_model.model."


@dataclass(frozen=True, kw_only=True)
class Projection:
    """One linear layer of the base model that gets an adapter."""

    name: str
    """Module path in the base model, for example ``model.layers.0.self_attn.q_proj``."""
    in_features: int
    out_features: int


class FlatAdapter(nn.Module):
    """A and B of every projection in one parameter ``flat`` [P], in the order of ``layout``: A₀, B₀, A₁, B₁, …"""

    def __init__(self, layout: Sequence[Projection], rank: int, *, seed: int) -> None:
        super().__init__()
        self.layout = tuple(layout)
        self.rank = rank
        self._shapes = [s for p in layout for s in ((rank, p.in_features), (p.out_features, rank))]
        self._sizes = [rows * columns for rows, columns in self._shapes]
        self.flat = nn.Parameter(torch.empty(sum(self._sizes), dtype=torch.float32))
        self._initialise(seed)

    def matrices(self) -> list[Tensor]:
        """Views [A₀, B₀, A₁, B₁, …] of ``flat``; their gradients arrive as one flat gradient."""
        pieces = self.flat.split(self._sizes)
        return [piece.view(shape) for piece, shape in zip(pieces, self._shapes, strict=True)]

    def peft_tensors(self) -> dict[str, Tensor]:
        """Views by PEFT name, detached."""
        return dict(zip(self._names(), [m.detach() for m in self.matrices()], strict=True))

    def load_peft_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        """Take the values of ``tensors``; raises `TrainerError` naming what is missing, surplus or of another shape."""
        mine = self.peft_tensors()
        if odd := sorted(mine.keys() ^ tensors.keys()):
            raise TrainerError(f"adapter does not fit the model: {odd[0]!r} is on one side only ({len(odd)} such tensors)")
        for name, target in mine.items():
            if tensors[name].shape != target.shape:
                found, wanted = tuple(tensors[name].shape), tuple(target.shape)
                raise TrainerError(f"adapter does not fit the model: {name!r} has shape {found}, here it is {wanted}")
            target.copy_(tensors[name])

    def _names(self) -> list[str]:
        return [f"{PEFT_PREFIX}{p.name}.lora_{matrix}.weight" for p in self.layout for matrix in ("A", "B")]

    @torch.no_grad()
    def _initialise(self, seed: int) -> None:
        """A uniform in ±1/√in (Kaiming with a = √5, as PEFT does it), B zero: a fresh adapter is the base model."""
        generator = torch.Generator().manual_seed(seed)
        for i, matrix in enumerate(self.matrices()):
            if i % 2:
                matrix.zero_()
            else:
                bound = matrix.shape[1] ** -0.5
                matrix.copy_(torch.empty(matrix.shape).uniform_(-bound, bound, generator=generator))


def fresh_adapter(layout: Sequence[Projection], rank: int, *, run_seed: int, agent: str) -> FlatAdapter:
    """The adapter an agent starts with: the same for the same run seed and name, on every machine of a kind."""
    return FlatAdapter(layout, rank, seed=derive_seed(run_seed, "adapter", agent))


def peft_config(lora: LoraConfig) -> dict[str, Scalar | list[str]]:
    """The fields of adapter_config.json that an engine or PEFT needs. ``lora_alpha`` is a whole number where it can be."""
    alpha: Any = int(lora.alpha) if lora.alpha == int(lora.alpha) else lora.alpha
    return {"r": lora.rank, "lora_alpha": alpha, "target_modules": sorted(lora.targets), "use_rslora": False}
