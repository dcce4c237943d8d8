"""Continuous batching for a plain transformers model: one running batch that rows join and leave between two steps.

    Batch.join(rows)   prefill of newcomers, then their caches are put beside the others', padded on the left
    Batch.step()       one token for every row; finished rows leave

Rows are kept sorted by adapter, so that each adapter's rows are one slice. Sampled log-probabilities are exact: of the
distribution after temperature, top-k and top-p.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from selfplay.agent import Sampling
from selfplay.policy.routed_lora import AdapterBank


@dataclass(eq=False, kw_only=True)
class Row:
    """One request while it is sampled."""

    request: str
    ids: Sequence[int]
    sampling: Sampling
    stop_ids: frozenset[int]
    adapter: str | None
    sampled: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    generator: torch.Generator | None = None
    aborted: bool = False

    @property
    def finish(self) -> Literal["stop", "length", "abort"] | None:
        """Why it is over; None while it is not."""
        if self.sampled and self.sampled[-1] in self.stop_ids:
            return "stop"
        if len(self.sampled) >= self.sampling.max_tokens:
            return "length"
        return "abort" if self.aborted else None


class Batch:
    """The rows under way, their key-value cache, and the logits of each one's next token."""

    def __init__(self, model: Any, bank: AdapterBank, generator: torch.Generator) -> None:
        self._model, self._bank, self._generator = model, bank, generator
        self._device = next(model.parameters()).device
        self.rows: list[Row] = []
        self._cache: list[tuple[Tensor, Tensor]] = []
        """Per layer: keys and values [B, heads, T, dim]."""
        self._mask = torch.zeros(0, 0, dtype=torch.long, device=self._device)
        """[B, T]: 1 where a row has a token, 0 where it is padded."""
        self._logits = torch.zeros(0)
        """[B, V] of each row's next token."""

    @torch.inference_mode()
    def join(self, rows: list[Row]) -> None:
        """Compute the prompts of ``rows`` and let them take part in the next step."""
        rows = sorted(rows, key=lambda r: r.adapter or "")
        length = max(len(r.ids) for r in rows)
        ids = torch.tensor([[0] * (length - len(r.ids)) + list(r.ids) for r in rows], device=self._device)
        mask = torch.tensor([[0] * (length - len(r.ids)) + [1] * len(r.ids) for r in rows], device=self._device)
        logits, cache = self._forward(rows, ids, mask, [])
        if self.rows:
            width = max(length, self._mask.shape[1])
            mask = torch.cat([_left_pad(self._mask, 1, width), _left_pad(mask, 1, width)])
            cache = [
                (_beside(old[0], new[0], width), _beside(old[1], new[1], width))
                for old, new in zip(self._cache, cache, strict=True)
            ]
            logits = torch.cat([self._logits, logits])
        self.rows, self._mask, self._cache, self._logits = self.rows + rows, mask, cache, logits
        self._keep(sorted(range(len(self.rows)), key=lambda i: self.rows[i].adapter or ""))

    @torch.inference_mode()
    def step(self) -> list[Row]:
        """Sample one token for every row; the rows that are over, which have left."""
        self._sample()
        over = [r for r in self.rows if r.finish]
        if over:
            self._keep([i for i, r in enumerate(self.rows) if not r.finish])
        if self.rows:
            last = torch.tensor([[r.sampled[-1]] for r in self.rows], device=self._device)
            self._mask = torch.cat([self._mask, torch.ones_like(last)], dim=1)
            self._logits, self._cache = self._forward(self.rows, last, self._mask, self._cache)
        return over

    def _sample(self) -> None:
        logprobs = processed_logprobs(self._logits, [r.sampling for r in self.rows])
        tokens = pick(logprobs, self.rows, self._generator)
        chosen = logprobs.gather(1, tokens[:, None])[:, 0].tolist()
        for row, token, logprob in zip(self.rows, tokens.tolist(), chosen, strict=True):
            row.sampled.append(token)
            row.logprobs.append(logprob)

    def _forward(
        self, rows: list[Row], ids: Tensor, mask: Tensor, cache: list[tuple[Tensor, Tensor]]
    ) -> tuple[Tensor, list[tuple[Tensor, Tensor]]]:
        """Logits [B, V] after ``ids`` [B, T], and the cache with them."""
        from transformers import DynamicCache

        past = DynamicCache()
        for layer, (keys, values) in enumerate(cache):
            past.update(keys, values, layer)
        positions = (mask.cumsum(1) - 1).clamp(min=0)[:, -ids.shape[1] :]
        self._bank.route([r.adapter for r in rows])
        out = self._model(
            input_ids=ids, attention_mask=mask, position_ids=positions, past_key_values=past, use_cache=True,
            logits_to_keep=1,
        )  # fmt: skip
        layers: list[Any] = list(past.layers)
        return out.logits[:, -1], [(layer.keys, layer.values) for layer in layers]

    def _keep(self, index: list[int]) -> None:
        """Keep the rows at ``index``, in that order, and cut away columns that only padding is left in."""
        self.rows = [self.rows[i] for i in index]
        if not index:
            self._cache = []
            return
        at = torch.tensor(index, device=self._device)
        mask = self._mask[at]
        start = int((mask.sum(0) > 0).int().argmax())
        self._mask, self._logits = mask[:, start:], self._logits[at]
        self._cache = [(k[at][:, :, start:], v[at][:, :, start:]) for k, v in self._cache]


def processed_logprobs(logits: Tensor, samplings: Sequence[Sampling]) -> Tensor:
    """Log-probabilities [B, V] (float32) of what is sampled from, after temperature, top-k and top-p of each row."""
    temperature = torch.tensor([s.temperature or 1.0 for s in samplings], device=logits.device)
    logprobs = torch.log_softmax(logits.float() / temperature[:, None], dim=-1)
    for i, s in enumerate(samplings):
        if s.temperature and (s.top_k or s.top_p < 1):
            logprobs[i] = _truncated(logprobs[i], s.top_k, s.top_p)
    return logprobs


def _truncated(logprobs: Tensor, top_k: int, top_p: float) -> Tensor:
    """[V] with everything outside top-k, then outside top-p, at −inf, and normalised."""
    if 0 < top_k < logprobs.numel():
        threshold = logprobs.topk(top_k).values[-1]
        logprobs = torch.log_softmax(logprobs.masked_fill(logprobs < threshold, -torch.inf), dim=-1)
    if top_p < 1:
        ranked, order = logprobs.sort(descending=True)
        before = ranked.exp().cumsum(0) - ranked.exp()
        dropped = order[before >= top_p]
        logprobs = torch.log_softmax(logprobs.index_fill(0, dropped, -torch.inf), dim=-1)
    return logprobs


def pick(logprobs: Tensor, rows: Sequence[Row], shared: torch.Generator) -> Tensor:
    """Token ids [B]: the most likely one at temperature 0, else sampled, with the row's own generator when it has a seed."""
    tokens = torch.multinomial(logprobs.exp(), 1, generator=shared)[:, 0]
    for i, row in enumerate(rows):
        if not row.sampling.temperature:
            tokens[i] = logprobs[i].argmax()
        elif row.generator is not None:
            tokens[i] = torch.multinomial(logprobs[i].exp(), 1, generator=row.generator)[0]
    return tokens


def _left_pad(x: Tensor, dim: int, width: int) -> Tensor:
    missing = width - x.shape[dim]
    if not missing:
        return x
    shape = list(x.shape)
    shape[dim] = missing
    return torch.cat([x.new_zeros(shape), x], dim=dim)


def _beside(old: Tensor, new: Tensor, width: int) -> Tensor:
    return torch.cat([_left_pad(old, 2, width), _left_pad(new, 2, width)])
