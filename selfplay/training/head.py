"""log π of chosen tokens through a frozen output head, without ever holding the logits of a whole row.

The vocabulary is much wider than the model, so logits and their gradient dominate memory. Here the hidden states are
taken a few at a time; the gradient with respect to them is computed on the spot (the head is frozen, so it needs no
other) and the backward pass only scales it.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

CHUNK_BYTES = {"cpu": 32 << 20, "cuda": 512 << 20}
"""fp32 logits held at once."""


def frozen_head_logprobs(
    hidden: Tensor, weight: Tensor, targets: Tensor, *, inv_temperature: float = 1.0
) -> tuple[Tensor, Tensor]:
    """(logprobs [N], entropies [N]) in fp32 of softmax(inv_temperature · hidden Wᵀ).

    hidden [N, D], weight [V, D], targets [N] long. Gradients flow from the logprobs to ``hidden`` only; the entropies
    are for the report and carry none.
    """
    chunk = max(1, CHUNK_BYTES.get(hidden.device.type, 32 << 20) // (4 * weight.shape[0]))
    out: tuple[Tensor, Tensor] = _FrozenHead.apply(hidden, weight, targets, inv_temperature, chunk)  # type: ignore[no-untyped-call]
    return out


class _FrozenHead(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, inv_temperature: float, chunk: int
    ) -> tuple[Tensor, Tensor]:
        logprobs = torch.empty(hidden.shape[0], dtype=torch.float32, device=hidden.device)
        entropies = torch.empty_like(logprobs)
        grad_hidden = torch.empty_like(hidden) if ctx.needs_input_grad[0] else None
        for start in range(0, hidden.shape[0], chunk):
            part = slice(start, start + chunk)
            logp_NV = (hidden[part] @ weight.t()).float().mul_(inv_temperature)
            logp_NV.sub_(torch.logsumexp(logp_NV, -1, keepdim=True))
            logprobs[part] = logp_NV.gather(1, targets[part, None])[:, 0]
            prob_NV = logp_NV.exp()
            entropies[part] = -torch.linalg.vecdot(prob_NV, logp_NV)
            if grad_hidden is not None:
                expected = prob_NV.to(weight.dtype) @ weight
                grad_hidden[part] = (F.embedding(targets[part], weight) - expected) * inv_temperature
        ctx.save_for_backward(grad_hidden)
        ctx.mark_non_differentiable(entropies)
        return logprobs, entropies

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        (grad_hidden,) = ctx.saved_tensors
        return grad_hidden * grad[:, None].to(grad_hidden.dtype), None, None, None, None
