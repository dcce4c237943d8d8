"""The usual trainer, as the reference of ``selfplay bench train``: what most reinforcement-learning loops for LLMs do.

Every turn is a sample of its own with its whole context before it, samples are padded to the longest of their batch, the
model returns logits everywhere, and one agent's adapter is active at a time (PEFT). In: the same segments as the packed
trainer. Out: the same gradients, by PEFT tensor name.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from selfplay.config.schema import LoraConfig
from selfplay.types import Segment

if TYPE_CHECKING:
    from torch import Tensor

BATCH = 4
"""Samples in one forward pass."""


@dataclass(frozen=True, kw_only=True)
class Sample:
    """One turn: its context and, from ``start`` on, what the agent said."""

    ids: tuple[int, ...]
    start: int
    logprobs: tuple[float, ...]
    advantages: tuple[float, ...]


def turn_samples(segment: Segment) -> Iterator[Sample]:
    """One sample per unbroken run of actions."""
    start = 0
    for end in range(1, len(segment.mask) + 1):
        if end < len(segment.mask) and segment.mask[end] == segment.mask[end - 1]:
            continue
        if segment.mask[start]:
            yield Sample(
                ids=segment.ids[:end], start=start, logprobs=segment.logprobs[start:end],
                advantages=segment.advantages[start:end],
            )  # fmt: skip
        start = end


class PaddedTrainer:
    """Forward and backward over a batch of segments; gradients pile up in the PEFT model's parameters."""

    def __init__(self, folder: Path, *, dtype: str, lora: LoraConfig, agents: Sequence[str]) -> None:
        import torch
        from peft import LoraConfig as PeftConfig
        from peft import get_peft_model
        from transformers import AutoModelForCausalLM

        base = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype), local_files_only=True)
        settings = PeftConfig(
            r=lora.rank,
            lora_alpha=lora.alpha,
            target_modules=list(lora.targets),
            task_type="CAUSAL_LM",
            lora_dropout=0.0,
        )
        self._model: Any = get_peft_model(base, settings, adapter_name=agents[0])
        for agent in agents[1:]:
            self._model.add_adapter(agent, settings)
        self._model.eval()

    def load(self, agent: str, tensors: Mapping[str, Tensor]) -> None:
        """Take an agent's matrices, by PEFT name, so that both trainers start from the same adapter."""
        for name, parameter in self._parameters(agent):
            parameter.data.copy_(tensors[name])

    def gradients(self, agent: str) -> dict[str, Tensor]:
        """The gradients of one agent, by PEFT name."""
        return {name: parameter.grad for name, parameter in self._parameters(agent)}

    def forget_gradients(self) -> None:
        self._model.zero_grad(set_to_none=True)

    def accumulate(self, segments: Sequence[Segment], num_actions: Mapping[str, int], *, cap: float) -> None:
        """Forward and backward of all samples, agent by agent."""
        for agent, num in num_actions.items():
            self._model.set_adapter(agent)
            samples = [sample for s in segments if s.agent == agent for sample in turn_samples(s)]
            for i in range(0, len(samples), BATCH):
                loss: Any = self._loss(samples[i : i + BATCH], cap) / num
                loss.backward()

    def _loss(self, samples: Sequence[Sample], cap: float) -> Tensor:
        """Truncated importance sampling over one padded batch: ids [B, T], logits [B, T, V]."""
        import torch

        length = max(len(s.ids) for s in samples)
        ids_BT = torch.tensor([(*s.ids, *[0] * (length - len(s.ids))) for s in samples])
        attention_BT = torch.tensor([[1] * len(s.ids) + [0] * (length - len(s.ids)) for s in samples])
        sampled_BT, advantages_BT = torch.zeros(ids_BT.shape), torch.zeros(ids_BT.shape)
        for i, s in enumerate(samples):
            sampled_BT[i, s.start : len(s.ids)] = torch.tensor(s.logprobs)
            advantages_BT[i, s.start : len(s.ids)] = torch.tensor(s.advantages)
        logits_BTV = self._model(input_ids=ids_BT, attention_mask=attention_BT, use_cache=False).logits[:, :-1]
        logprobs_BT: Tensor = logits_BTV.float().log_softmax(-1).gather(-1, ids_BT[:, 1:, None])[..., 0]
        weights_BT = (logprobs_BT.detach() - sampled_BT[:, 1:]).exp().clamp(max=cap)
        return -(weights_BT * advantages_BT[:, 1:] * logprobs_BT).sum()

    def _parameters(self, agent: str) -> Iterator[tuple[str, Any]]:
        for name, parameter in self._model.named_parameters():
            if f".{agent}." in name and ".lora_" in name:
                yield name.replace(f".{agent}.", "."), parameter
