"""Log-probabilities of chosen tokens through the frozen output head, without ever holding logits [N, V].

The head is frozen, so the gradient with respect to the hidden state has a closed form,

    ∂ log p(y) / ∂h  =  (W[y] − Σᵥ p(v) W[v]) / τ ,

and is computed in the forward pass, chunk by chunk, while the probabilities are at hand. Backward is one scaling.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

CHUNK = 128
"""Rows of logits held at once."""


def frozen_head_logprobs(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, *, temperature: float = 1.0
) -> tuple[Tensor, Tensor]:
    """hidden [N, H], weight [V, H], bias [V] or None, targets [N] → (logprobs [N], entropies [N]), float32, natural log.

    Both are of the distribution softmax(logits / ``temperature``). Entropies carry no gradient.
    """
    out: tuple[Tensor, Tensor] = _FrozenHead.apply(hidden, weight, bias, targets, temperature)  # type: ignore[no-untyped-call]
    return out


class _FrozenHead(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, temperature: float
    ) -> tuple[Tensor, Tensor]:
        num = hidden.shape[0]
        logprobs = torch.empty(num, dtype=torch.float32, device=hidden.device)
        entropies = torch.empty_like(logprobs)
        grad = torch.empty_like(hidden) if ctx.needs_input_grad[0] else None
        for start in range(0, num, CHUNK):
            part = slice(start, start + CHUNK)
            logs = F.log_softmax(F.linear(hidden[part], weight, bias).float().div_(temperature), dim=-1)
            chosen = targets[part]
            logprobs[part] = logs.gather(1, chosen[:, None])[:, 0]
            probabilities = logs.exp()
            entropies[part] = -torch.linalg.vecdot(probabilities, logs)
            if grad is not None:
                mean = probabilities.to(weight.dtype) @ weight
                grad[part] = (F.embedding(chosen, weight) - mean).div_(temperature)
        if grad is not None:
            ctx.save_for_backward(grad)
        ctx.mark_non_differentiable(entropies)
        return logprobs, entropies

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (grad,) = ctx.saved_tensors
        return grad * grads[0][:, None].to(grad.dtype), None, None, None, None
