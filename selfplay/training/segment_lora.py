"""y = x Wᵀ + b + scale · (x Aᵀ) Bᵀ with another (A, B, scale) for each run of tokens, and W frozen.

One autograd node per projection: it keeps x and the small x Aᵀ, computes no gradient for W, and casts the fp32 adapter
to the dtype of x for the products only.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

Bounds = tuple[tuple[int, int, float], ...]
"""(start, end, scale) of each run."""


class SegmentLora(torch.autograd.Function):
    """``apply(x, weight, bias, bounds, A0, B0, A1, B1, …)``: tokens ``bounds[k]`` use (Ak, Bk); others the base alone."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, bounds: Bounds, *adapters: Tensor) -> Tensor:
        rows = x.reshape(-1, x.shape[-1])
        y = F.linear(rows, weight, bias)
        saved: list[Tensor] = []
        for (start, end, scale), a, b in zip(bounds, adapters[::2], adapters[1::2], strict=True):
            a, b = a.to(x.dtype), (b * scale).to(x.dtype)
            reduced = rows[start:end] @ a.t()
            y[start:end].addmm_(reduced, b.t())
            saved += [reduced, a, b]
        ctx.save_for_backward(rows, weight, *saved)
        ctx.bounds = bounds
        return y.view(*x.shape[:-1], -1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        rows, weight, *saved = ctx.saved_tensors
        grad_rows = grad.reshape(-1, grad.shape[-1])
        grad_x = grad_rows @ weight if ctx.needs_input_grad[0] else None
        out: list[Tensor] = []
        for k, (start, end, scale) in enumerate(ctx.bounds):
            reduced, a, b = saved[3 * k : 3 * k + 3]
            part = grad_rows[start:end]
            grad_reduced = part @ b
            if grad_x is not None:
                grad_x[start:end].addmm_(grad_reduced, a)
            out.append((grad_reduced.t() @ rows[start:end]).float())
            out.append((part.t() @ reduced).float() * scale)
        whole = None if grad_x is None else grad_x.view(*grad.shape[:-1], -1)
        return (whole, None, None, None, *out)
