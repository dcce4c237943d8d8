"""log π of chosen tokens through a frozen output head, without ever holding the logits of a whole row.

The vocabulary is much wider than the model, so logits and their gradient dominate memory. Here the hidden states are
taken a few at a time; the gradient with respect to them is computed on the spot (the head is frozen, so it needs no
other) and the backward pass only scales it. So it is for the entropy and for the divergence from another policy, which
are exact sums over the vocabulary. `trained_head` is the same for a head that learns, too: its chunks are computed again in
the backward pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

CHUNK_BYTES = {"cpu": 32 << 20, "cuda": 512 << 20}
"""fp32 logits held at once."""


@dataclass(frozen=True)
class HeadOutput:
    """Of N (hidden state, token) pairs, fp32. Gradients flow to the hidden states from each that was asked for."""

    logprobs: Tensor
    """[N] log π of the token."""
    entropies: Tensor
    """[N] of π; with gradient only when asked for."""
    divergences: Tensor
    """[N] KL(π ‖ reference) over the whole vocabulary; zeros without a reference."""


def join(outputs: Sequence[HeadOutput]) -> HeadOutput:
    """One after the other."""
    return HeadOutput(
        torch.cat([o.logprobs for o in outputs]), torch.cat([o.entropies for o in outputs]),
        torch.cat([o.divergences for o in outputs]),
    )  # fmt: skip


def frozen_head(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    inv_temperature: float = 1.0,
    reference: Tensor | None = None,
    entropy_gradient: bool = False,
    kept: Tensor | None = None,
) -> HeadOutput:
    """π = softmax(inv_temperature · hidden Wᵀ) at N places, over the tokens that were left to sample from.

    hidden [N, D], weight [V, D], targets [N] long, ``reference`` [N, D]: hidden states of another policy with the same
    head. ``kept`` [N, K]: the only tokens with probability, −1 where there are fewer; a row that begins with −1, and None,
    mean the whole vocabulary. Only ``hidden`` gets a gradient. All of it is computed in float32 (docs/decisions/0027).
    """
    chunk = max(1, CHUNK_BYTES.get(hidden.device.type, 32 << 20) // (4 * weight.shape[0]))
    arguments = (hidden, weight.float(), targets, inv_temperature, reference, entropy_gradient, kept, chunk)
    out = _FrozenHead.apply(*arguments)  # type: ignore[no-untyped-call]
    return HeadOutput(*out)


def trained_head(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    inv_temperature: float = 1.0,
    reference: tuple[Tensor, Tensor] | None = None,
    entropy_gradient: bool = False,
    kept: Tensor | None = None,
) -> HeadOutput:
    """As `frozen_head`, but ``weight`` gets a gradient, too, and ``reference`` has a head of its own: hidden [N, D], weight [V, D]."""
    weight = weight.float()
    chunk = max(1, CHUNK_BYTES.get(hidden.device.type, 32 << 20) // (4 * weight.shape[0]))
    parts: list[tuple[Tensor, Tensor, Tensor]] = []
    for start in range(0, max(1, hidden.shape[0]), chunk):
        part = slice(start, start + chunk)
        theirs = None if reference is None else (reference[0][part], reference[1].float())
        own_kept = None if kept is None else kept[part]
        arguments = (hidden[part], weight, targets[part], inv_temperature, theirs, own_kept)
        parts.append(checkpoint(_trained_chunk, *arguments, use_reentrant=False, preserve_rng_state=False))
    logprobs, entropies, divergences = (torch.cat(of) for of in zip(*parts, strict=True))
    return HeadOutput(logprobs, entropies if entropy_gradient else entropies.detach(), divergences)


def _trained_chunk(
    hidden: Tensor, weight: Tensor, targets: Tensor, inv_temperature: float, reference: tuple[Tensor, Tensor] | None,
    kept: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    out_NV = None if kept is None else _left_out(kept, weight.shape[0])
    logp_NV = _traced_log_softmax(hidden, weight, inv_temperature, out_NV)
    logprobs, prob_NV = logp_NV.gather(1, targets[:, None])[:, 0], logp_NV.exp()
    finite_NV = logp_NV if out_NV is None else logp_NV.masked_fill(out_NV, 0.0)
    entropies = -(prob_NV * finite_NV).sum(-1)
    if reference is None:
        return logprobs, entropies, torch.zeros_like(logprobs)
    with torch.no_grad():
        theirs_NV = _log_softmax(*reference, inv_temperature, out_NV)
        theirs_NV = theirs_NV if out_NV is None else theirs_NV.masked_fill(out_NV, 0.0)
    return logprobs, entropies, (prob_NV * (finite_NV - theirs_NV)).sum(-1)


class _FrozenHead(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, inv_temperature: float, reference: Tensor | None,
        entropy_gradient: bool, kept: Tensor | None, chunk: int,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        num, trains = hidden.shape[0], ctx.needs_input_grad[0]
        logprobs, entropies, divergences = (hidden.new_zeros(num, dtype=torch.float32) for _ in range(3))
        wanted = (trains, trains and entropy_gradient, trains and reference is not None)
        grads = [torch.empty_like(hidden, dtype=torch.float32) if w else None for w in wanted]
        for start in range(0, num, chunk):
            part = slice(start, start + chunk)
            out_NV = None if kept is None else _left_out(kept[part], weight.shape[0])
            logp_NV = _log_softmax(hidden[part], weight, inv_temperature, out_NV)
            prob_NV = logp_NV.exp()
            logprobs[part] = logp_NV.gather(1, targets[part, None])[:, 0]
            if out_NV is not None:
                logp_NV = logp_NV.masked_fill(out_NV, 0.0)  # beside a probability of 0; −∞ would not be a number there
            entropies[part] = -torch.linalg.vecdot(prob_NV, logp_NV)
            if grads[0] is not None:
                expected = prob_NV @ weight
                grads[0][part] = (F.embedding(targets[part], weight) - expected) * inv_temperature
            if grads[1] is not None:  # dH/dz = −p (log p + H)
                slope = -prob_NV * (logp_NV + entropies[part, None])
                grads[1][part] = (slope @ weight) * inv_temperature
            if reference is not None:  # dKL/dz = p (log p − log q − KL)
                gap_NV = logp_NV - _log_softmax(reference[part], weight, inv_temperature, out_NV)
                gap_NV = gap_NV if out_NV is None else gap_NV.masked_fill(out_NV, 0.0)
                divergences[part] = torch.linalg.vecdot(prob_NV, gap_NV)
                if grads[2] is not None:
                    slope = prob_NV * (gap_NV - divergences[part, None])
                    grads[2][part] = (slope @ weight) * inv_temperature
        ctx.save_for_backward(*grads)
        ctx.dtype = hidden.dtype
        ctx.mark_non_differentiable(*(t for t, w in zip((entropies, divergences), wanted[1:], strict=True) if not w))
        return logprobs, entropies, divergences

    @staticmethod
    def backward(ctx: Any, *slopes: Tensor | None) -> tuple[Tensor | None, ...]:
        total: Tensor | None = None
        for grad, slope in zip(ctx.saved_tensors, slopes, strict=True):
            if grad is not None and slope is not None:
                term = grad * slope[:, None]
                total = term if total is None else total + term
        return (None if total is None else total.to(ctx.dtype), *[None] * 7)


def _left_out(kept: Tensor, vocab: int) -> Tensor:
    """[N, V] bool: the tokens that had no probability."""
    out = torch.ones(len(kept), vocab + 1, dtype=torch.bool, device=kept.device)
    out.scatter_(1, kept.masked_fill(kept < 0, vocab), False)
    out[kept[:, 0] < 0] = False
    return out[:, :vocab]


def _log_softmax(hidden: Tensor, weight: Tensor, inv_temperature: float, left_out: Tensor | None) -> Tensor:
    """[N, V] fp32; −∞ for what is left out."""
    logp_NV = (hidden.float() @ weight.t()).mul_(inv_temperature)
    if left_out is not None:
        logp_NV.masked_fill_(left_out, -torch.inf)
    return logp_NV.sub_(torch.logsumexp(logp_NV, -1, keepdim=True))


def _traced_log_softmax(hidden: Tensor, weight: Tensor, inv_temperature: float, left_out: Tensor | None) -> Tensor:
    """[N, V] fp32 with a graph; −∞ for what is left out."""
    logits_NV = (hidden.float() @ weight.t()) * inv_temperature
    if left_out is not None:
        logits_NV = logits_NV.masked_fill(left_out, -torch.inf)
    return F.log_softmax(logits_NV, -1)
