"""Computed prompts of the transformers engine: the same prompt is computed once, and one that begins alike goes on from there.

In: an adapter and token ids. Out: the keys and values of every token and the logits of the next one. An entry belongs to the
very adapter tensors that computed it, so nothing of one version is ever used for another, whatever its name.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

Layers = list[tuple[Tensor, Tensor]]
"""Per layer: keys and values [1, heads, T, dim]."""
Adapter = object | None


@dataclass(eq=False, frozen=True)
class Prompt:
    """T tokens as computed."""

    ids: tuple[int, ...]
    layers: Layers
    logits: Tensor
    """[1, V] of the token after them."""


Compute = Callable[[Sequence[int], Layers], tuple[Tensor, Layers]]
"""(new tokens, what is before them) → (logits [1, V], keys and values of all)."""


class PromptCache:
    """Prompts by adapter, the least recently used dropped beyond ``max_tokens``."""

    def __init__(self, max_tokens: int) -> None:
        self._max_tokens = max_tokens
        self._entries: OrderedDict[tuple[int, tuple[int, ...]], tuple[Adapter, Prompt]] = OrderedDict()
        self.num_tokens = 0
        self.num_computed = 0
        """Tokens that were computed, of all that were asked for."""

    def get(self, adapter: Adapter, ids: tuple[int, ...], compute: Compute) -> Prompt:
        """The prompt, computed as far as no earlier one of the same adapter begins alike."""
        found = self._entries.get((id(adapter), ids))
        if found is not None:
            self._entries.move_to_end((id(adapter), ids))
            return found[1]
        shared, like = self._longest(adapter, ids)
        past = [(k[:, :, :shared], v[:, :, :shared]) for k, v in like.layers] if like is not None else []
        logits, layers = compute(ids[shared:], past)
        self.num_computed += len(ids) - shared
        prompt = Prompt(ids, layers, logits)
        self._keep(adapter, prompt)
        return prompt

    def forget(self, adapter: Adapter) -> None:
        """Drop everything that ``adapter`` computed."""
        for key in [k for k, (owner, _) in self._entries.items() if owner is adapter]:
            self._drop(key)

    def _longest(self, adapter: Adapter, ids: tuple[int, ...]) -> tuple[int, Prompt | None]:
        """How many tokens the best entry begins alike with, at most all but the last; and that entry."""
        best, like = 0, None
        for owner, prompt in self._entries.values():
            if owner is adapter:
                shared = min(_shared(prompt.ids, ids), len(ids) - 1)
                if shared > best:
                    best, like = shared, prompt
        return best, like

    def _keep(self, adapter: Adapter, prompt: Prompt) -> None:
        """The adapter is kept with the entry, so that its id is not given to another one meanwhile."""
        self._entries[id(adapter), prompt.ids] = (adapter, prompt)
        self.num_tokens += len(prompt.ids)
        while self.num_tokens > self._max_tokens and len(self._entries) > 1:
            self._drop(next(iter(self._entries)))

    def _drop(self, key: tuple[int, tuple[int, ...]]) -> None:
        self.num_tokens -= len(self._entries.pop(key)[1].ids)


def _shared(a: Sequence[int], b: Sequence[int]) -> int:
    low, high = 0, min(len(a), len(b))
    while low < high:
        middle = (low + high + 1) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
