"""Linear layers whose rows belong to different agents: each agent's rows go through its own A and B.

    rows of x   │ agent a │ agent b    │ agent c │          y = x Wᵀ + bias + s · (x Aᵀ) Bᵀ   with the A, B of the row's agent

A packed row is sorted by agent, so an agent is one contiguous range and costs two small matrix products more than the
base. The frozen weight gets no gradient; adapters stay float32 and are cast to the base's dtype for the products.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from selfplay.errors import TrainerError
from selfplay.training.adapter import Projection

Range = tuple[int, int]


@dataclass(kw_only=True)
class ActiveAdapters:
    """What the adapted layers of a model look up in each pass: the ranges of the present row and whose they are."""

    scale: float
    ranges: Sequence[Range] = ()
    """[start, end) of each agent's tokens; they tile the row."""
    matrices: Sequence[Sequence[Tensor]] = field(default_factory=list)
    """For each range the views A₀, B₀, A₁, B₁, … of its agent."""


class SegmentLinear(nn.Module):
    """Takes the place of a frozen ``nn.Linear``; holds its weight, and reads the adapters from ``active``."""

    def __init__(self, base: nn.Linear, index: int, active: ActiveAdapters) -> None:
        super().__init__()
        self.weight, self.bias = base.weight, base.bias
        self._index, self._active = index, active

    def forward(self, x: Tensor) -> Tensor:
        active = self._active
        if not active.ranges:
            return F.linear(x, self.weight, self.bias)
        pair = slice(2 * self._index, 2 * self._index + 2)
        matrices = [m for views in active.matrices for m in views[pair]]
        out: Tensor = _SegmentLora.apply(x, self.weight, self.bias, active.scale, active.ranges, *matrices)  # type: ignore[no-untyped-call]
        return out


def adapt(model: nn.Module, targets: Sequence[str], active: ActiveAdapters) -> tuple[Projection, ...]:
    """Replace every linear layer called one of ``targets``; what was replaced, in the model's order.

    Raises `TrainerError` when a target does not occur, or is not an ``nn.Linear``.
    """
    found = [(name, module) for name, module in model.named_modules() if name.rpartition(".")[2] in targets]
    missing = set(targets) - {name.rpartition(".")[2] for name, _ in found}
    if missing:
        raise TrainerError(
            f"lora.targets: the model has no layer called {', '.join(sorted(missing))}; it has {', '.join(_linear_names(model))}"
        )
    layout = []
    for index, (name, module) in enumerate(found):
        if not isinstance(module, nn.Linear):
            raise TrainerError(f"lora.targets: {name} is a {type(module).__name__}; only nn.Linear layers can be adapted")
        parent, _, last = name.rpartition(".")
        setattr(model.get_submodule(parent), last, SegmentLinear(module, index, active))
        layout.append(Projection(name=name, in_features=module.in_features, out_features=module.out_features))
    return tuple(layout)


def _linear_names(model: nn.Module) -> list[str]:
    return sorted({name.rpartition(".")[2] for name, m in model.named_modules() if isinstance(m, nn.Linear)})


class _SegmentLora(torch.autograd.Function):
    """Saves the input once (shared with sibling projections) and the small x Aᵀ; never x·W for the adapter's sake."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, scale: float, ranges: Sequence[Range], *matrices: Tensor
    ) -> Tensor:
        rows = x.reshape(-1, x.shape[-1])
        out = F.linear(rows, weight, bias)
        casts, middles = [], []
        for (start, end), a, b in zip(ranges, matrices[::2], matrices[1::2], strict=True):
            a_cast, b_cast = a.to(x.dtype), (b * scale).to(x.dtype)
            middle = rows[start:end] @ a_cast.t()
            out[start:end].addmm_(middle, b_cast.t())
            casts += [a_cast, b_cast]
            middles.append(middle)
        ctx.save_for_backward(rows, weight, *casts, *middles)
        ctx.ranges, ctx.scale, ctx.dtype = ranges, scale, matrices[0].dtype
        return out.view(*x.shape[:-1], -1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        num = len(ctx.ranges)
        rows, weight, *rest = ctx.saved_tensors
        casts, middles = rest[: 2 * num], rest[2 * num :]
        grad = grads[0].reshape(-1, grads[0].shape[-1])
        grad_rows = grad @ weight if ctx.needs_input_grad[0] else None
        out: list[Tensor] = []
        for (start, end), a, b, middle in zip(ctx.ranges, casts[::2], casts[1::2], middles, strict=True):
            part = grad[start:end]
            grad_middle = part @ b
            if grad_rows is not None:
                grad_rows[start:end].addmm_(grad_middle, a)
            out.append((grad_middle.t() @ rows[start:end]).to(ctx.dtype))
            out.append((part.t() @ middle).to(ctx.dtype).mul_(ctx.scale))
        grad_x = None if grad_rows is None else grad_rows.view(*grads[0].shape[:-1], -1)
        return (grad_x, None, None, None, None, *out)
