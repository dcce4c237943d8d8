"""Continuous batching for a plain transformers model: one running batch that requests join and leave between two steps.

    Batch.join(rows)   newcomers' prompts, each once, their caches put beside the others', padded on the left
    Batch.step()       one token for every request; those that are over leave

Computed rows are kept sorted by adapter, so that each adapter's rows are one slice. Sampled log-probabilities are exact: of the
distribution after temperature, top-k and top-p.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from selfplay.agent import Sampling
from selfplay.policy.engine import truncates
from selfplay.policy.prompt_cache import Layers, Prompt, PromptCache
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
    kept: list[tuple[int, ...]] = field(default_factory=list)
    """With top-k or top-p: what each token was sampled among."""
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
    """The requests under way, and the rows that are computed for them.

    Requests that are at the same point of the same text under the same adapter share one row: they part when they sample
    different tokens. So many samples of few prompts cost as much as the texts that differ.
    """

    def __init__(self, model: Any, bank: AdapterBank, generator: torch.Generator, *, prompt_tokens: int = 0) -> None:
        """``prompt_tokens``: how many tokens of computed prompts are kept for requests that begin alike."""
        self._model, self._bank, self._generator = model, bank, generator
        self._device = next(model.parameters()).device
        self.prompts = PromptCache(prompt_tokens)
        self.rows: list[Row] = []
        self._at: list[int] = []
        """Which computed row each request is at."""
        self._adapters: list[str | None] = []
        """Of the computed rows; equal ones are adjacent."""
        self._cache: list[tuple[Tensor, Tensor]] = []
        """Per layer: keys and values [B, heads, T, dim]."""
        self._mask = torch.zeros(0, 0, dtype=torch.long, device=self._device)
        """[B, T]: 1 where a row has a token, 0 where it is padded."""
        self._logits = torch.zeros(0)
        """[B, V] of each row's next token."""

    @property
    def num_computed_rows(self) -> int:
        """B; at most the number of requests."""
        return len(self._adapters)

    @torch.inference_mode()
    def join(self, rows: list[Row]) -> None:
        """Compute the prompts of ``rows`` and let them take part in the next step."""
        known: dict[tuple[str | None, tuple[int, ...]], int] = {}
        prompts: list[Prompt] = []
        for row in rows:
            key = (row.adapter, tuple(row.ids))
            if key not in known:
                known[key] = len(self._adapters) + len(prompts)
                prompts.append(self.prompt(*key))
            self._at.append(known[key])
        self.rows = self.rows + rows
        self._put_beside(prompts)
        self._adapters += [adapter for adapter, _ in known]
        order = sorted(range(len(self._adapters)), key=lambda i: self._adapters[i] or "")
        place = {old: new for new, old in enumerate(order)}
        self._at = [place[i] for i in self._at]
        self._select(order)

    @torch.inference_mode()
    def step(self) -> list[Row]:
        """Sample one token for every request; those that are over, which have left."""
        self._sample()
        over = [r for r in self.rows if r.finish]
        going = [(r, at) for r, at in zip(self.rows, self._at, strict=True) if not r.finish]
        places: dict[tuple[int, int], int] = {}
        for row, at in going:
            places.setdefault((at, row.sampled[-1]), 0)
        ordered = sorted(places)
        places = {key: i for i, key in enumerate(ordered)}
        self.rows = [r for r, _ in going]
        self._at = [places[at, r.sampled[-1]] for r, at in going]
        self._select([at for at, _ in ordered])
        if self.rows:
            last = torch.tensor([[token] for _, token in ordered], device=self._device)
            self._mask = torch.cat([self._mask, torch.ones_like(last)], dim=1)
            self._logits, self._cache = self._forward(self._adapters, last, self._mask, self._cache)
        return over

    @torch.inference_mode()
    def prompt(self, adapter: str | None, ids: tuple[int, ...]) -> Prompt:
        """A prompt as computed, from the cache as far as it is there."""

        def compute(new: Sequence[int], past: Layers) -> tuple[Tensor, Layers]:
            length = len(ids)
            mask = torch.ones(1, length, dtype=torch.long, device=self._device)
            return self._forward([adapter], torch.tensor([list(new)], device=self._device), mask, past)

        return self.prompts.get(None if adapter is None else self._bank.adapters[adapter], ids, compute)

    @torch.inference_mode()
    def continuations(
        self, adapter: str | None, ids: tuple[int, ...], answers: Sequence[Sequence[int]]
    ) -> tuple[float, ...]:
        """Log-probability of each answer after ``ids``, at temperature 1; all answers are computed side by side."""
        prompt = self.prompt(adapter, ids)
        first = torch.log_softmax(prompt.logits[0].float(), -1)
        found = [float(first[answer[0]]) for answer in answers]
        width = max(map(len, answers)) - 1
        if not width:
            return tuple(found)
        given = [[*a[:-1], *[0] * (width + 1 - len(a))] for a in answers]
        mask = torch.tensor([[1] * len(ids) + [1] * (len(a) - 1) + [0] * (width + 1 - len(a)) for a in answers])
        rows = [(k.expand(len(answers), -1, -1, -1), v.expand(len(answers), -1, -1, -1)) for k, v in prompt.layers]
        logits = self._all_logits([adapter] * len(answers), given, mask, rows)
        for i, answer in enumerate(answers):
            logs = torch.log_softmax(logits[i, : len(answer) - 1].float(), -1)
            found[i] += float(logs.gather(1, torch.tensor(answer[1:], device=self._device)[:, None]).sum())
        return tuple(found)

    def _all_logits(
        self, adapters: Sequence[str | None], ids: list[list[int]], mask: Tensor, cache: list[tuple[Tensor, Tensor]]
    ) -> Tensor:
        """Logits [B, T, V] at every one of ``ids`` [B, T]."""
        from transformers import DynamicCache

        past = DynamicCache()
        for layer, (keys, values) in enumerate(cache):
            past.update(keys, values, layer)
        mask = mask.to(self._device)
        self._bank.route(adapters)
        logits: Tensor = self._model(
            input_ids=torch.tensor(ids, device=self._device), attention_mask=mask, past_key_values=past, use_cache=True,
            position_ids=(mask.cumsum(1) - 1).clamp(min=0)[:, -len(ids[0]) :],
        ).logits  # fmt: skip
        return logits

    def _put_beside(self, prompts: Sequence[Prompt]) -> None:
        """Add one computed row for each prompt, all padded on the left to the longest."""
        lengths = [len(p.ids) for p in prompts]
        width = max(self._mask.shape[1] if self._adapters else 0, *lengths)
        masks = [torch.ones(1, n, dtype=torch.long, device=self._device) for n in lengths]
        old = [(self._mask, self._cache, self._logits)] if self._adapters else []
        parts = old + [(m, p.layers, p.logits) for m, p in zip(masks, prompts, strict=True)]
        self._mask = torch.cat([_left_pad(m, 1, width) for m, _, _ in parts])
        self._logits = torch.cat([logits for _, _, logits in parts])
        self._cache = [
            (
                torch.cat([_left_pad(k, 2, width) for k, _ in layer]),
                torch.cat([_left_pad(v, 2, width) for _, v in layer]),
            )
            for layer in zip(*(layers for _, layers, _ in parts), strict=True)
        ]

    def _sample(self) -> None:
        """What is sampled from is computed once for all requests that share a row and the way they sample."""
        alike: dict[tuple[int, float, int, float], list[Row]] = {}
        for row, at in zip(self.rows, self._at, strict=True):
            s = row.sampling
            alike.setdefault((at, s.temperature, s.top_k, s.top_p), []).append(row)
        rows = torch.tensor([at for at, *_ in alike], device=self._device)
        logprobs = processed_logprobs(self._logits[rows], [group[0].sampling for group in alike.values()])
        for logprobs_V, group in zip(logprobs, alike.values(), strict=True):
            tokens = pick(logprobs_V, group, self._generator)
            kept = tuple(logprobs_V.isfinite().nonzero()[:, 0].tolist()) if truncates(group[0].sampling) else None
            for row, token, logprob in zip(group, tokens.tolist(), logprobs_V[tokens].tolist(), strict=True):
                row.sampled.append(token)
                row.logprobs.append(logprob)
                if kept is not None:
                    row.kept.append(kept)

    def _forward(
        self, adapters: Sequence[str | None], ids: Tensor, mask: Tensor, cache: list[tuple[Tensor, Tensor]]
    ) -> tuple[Tensor, list[tuple[Tensor, Tensor]]]:
        """Logits [B, V] after ``ids`` [B, T], and the cache with them."""
        from transformers import DynamicCache

        past = DynamicCache()
        for layer, (keys, values) in enumerate(cache):
            past.update(keys, values, layer)
        positions = (mask.cumsum(1) - 1).clamp(min=0)[:, -ids.shape[1] :]
        self._bank.route(adapters)
        out = self._model(
            input_ids=ids, attention_mask=mask, position_ids=positions, past_key_values=past, use_cache=True,
            logits_to_keep=1,
        )  # fmt: skip
        layers: list[Any] = list(past.layers)
        return out.logits[:, -1], [(layer.keys, layer.values) for layer in layers]

    def _select(self, index: list[int]) -> None:
        """Take the computed rows at ``index``, in that order, and cut away columns that only padding is left in."""
        self._adapters = [self._adapters[i] for i in index]
        if not index:
            self._cache = []
            return
        if index == list(range(len(self._mask))) and bool(self._mask[:, 0].any()):
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
        if truncates(s):
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
    """Token ids [B] out of ``logprobs`` [V], one for each of ``rows``, which sample alike: the most likely one at temperature
    0, else by inverting the distribution function, at a number from the row's own generator when it has a seed."""
    if not rows[0].sampling.temperature:
        return logprobs.argmax().expand(len(rows))
    at = torch.rand(len(rows), generator=shared, dtype=torch.float64, device=logprobs.device)
    for i, row in enumerate(rows):
        if row.generator is not None:
            at[i] = torch.rand((), generator=row.generator, dtype=torch.float64, device=logprobs.device)
    up_to = logprobs.double().exp().cumsum(0)
    return torch.searchsorted(up_to, (1.0 - at) * up_to[-1])  # above 0: never at a token without probability


def _left_pad(x: Tensor, dim: int, width: int) -> Tensor:
    missing = width - x.shape[dim]
    if not missing:
        return x
    shape = list(x.shape)
    shape[dim] = missing
    return torch.cat([x.new_zeros(shape), x], dim=dim)
