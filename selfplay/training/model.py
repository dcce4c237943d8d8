"""The policy that is trained: one frozen causal LM, one flat LoRA adapter per agent, rows of packed segments.

In: a model folder, agents, a `PackedRow`. Out: log π and entropy of each action token. All agents of a row are computed
in one pass over the base; logits exist only where actions are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from selfplay.config.schema import LoraConfig
from selfplay.errors import TrainerError
from selfplay.training import attention
from selfplay.training.head import frozen_head_logprobs
from selfplay.training.lora import ActiveRow, FlatAdapter, attach, find_layout
from selfplay.training.rows import PackedRow, pack_row, teacher_forced

_ROUNDING = {torch.float32: 0.002, torch.bfloat16: 0.15}
"""Mean |Δlogprob| between two orders of computing the same thing."""


def load_policy(
    folder: Path | str, *, dtype: torch.dtype, lora: LoraConfig, agents: Sequence[str], seed: int
) -> PackedPolicy:
    """The policy with fresh adapters, on the CPU. Nothing is fetched, and no code of the model folder runs.

    Raises `ConfigError` for LoRA targets the model does not have, `TrainerError` for a model that would be computed
    wrongly here: some architectures scale or cap their logits, or ignore the segments of a row.
    """
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    attention.register()
    base = AutoModelForCausalLM.from_pretrained(
        folder, dtype=dtype, attn_implementation="eager", local_files_only=True, use_safetensors=True
    )
    base.requires_grad_(False).eval()
    samples = _samples(_vocab_size(base))
    expected = [_own_logprobs(base, ids) for ids in samples]
    base.set_attn_implementation(attention.NAME)
    policy = PackedPolicy(base, lora, agents, seed=seed)
    _check_route(policy, samples, torch.cat(expected))
    return policy


class PackedPolicy(nn.Module):
    """Base, adapters and head as one module, so that FSDP's hooks on the root see one forward from ids to logprobs."""

    def __init__(self, base: Any, lora: LoraConfig, agents: Sequence[str], *, seed: int) -> None:
        super().__init__()
        self.base = base
        self.layout = find_layout(base, lora)
        self._row = ActiveRow()
        attach(base, self.layout, self._row)
        self._agents = tuple(sorted(agents))
        for agent in self._agents:
            self.add_module(_key(agent), FlatAdapter.create(self.layout, seed=seed, agent=agent))

    @property
    def adapters(self) -> Mapping[str, FlatAdapter]:
        """Agent → adapter, by name."""
        return {agent: self._adapter(agent) for agent in self._agents}

    @property
    def device(self) -> torch.device:
        return self._adapter(self._agents[0]).flat.device

    @property
    def vocab_size(self) -> int:
        """Token ids the embedding knows."""
        return _vocab_size(self.base)

    @property
    def layers(self) -> nn.ModuleList:
        """The repeated blocks of the base: what FSDP shards and what activation checkpointing recomputes."""
        return next(m for m in self.base.modules() if isinstance(m, nn.ModuleList))

    def forward(self, row: PackedRow, inv_temperature: float = 1.0) -> tuple[Tensor, Tensor]:
        """(logprobs [N] with gradient, entropies [N] without), fp32, of the row's action tokens.

        One row at a time: the backward pass of a row must be over before the next row goes forward.
        """
        self._row.set(row.runs, self.adapters)
        hidden = self._decoder(row).last_hidden_state[0]
        weight = self.base.get_output_embeddings().weight
        return frozen_head_logprobs(hidden[row.predicted_from], weight, row.targets, inv_temperature=inv_temperature)

    @torch.no_grad()
    def probe(self, agent: str, ids: Sequence[int]) -> list[float]:
        """log π [T−1] of ``ids`` [T] under the agent, at temperature 1, by the same route as in training."""
        if len(ids) < 2 or agent not in self._agents:
            raise TrainerError(f"cannot probe {len(ids)} tokens of agent {agent!r}: need 2 tokens of a trained agent")
        logprobs, _ = self(pack_row([teacher_forced(agent, ids)], self.device))
        return [float(x) for x in logprobs.tolist()]

    def recompute_activations(self) -> None:
        """Keep only each layer's input in the forward pass. Call before sharding."""
        for layer in self.layers:
            layer.forward = partial(checkpoint, layer.forward, use_reentrant=False, preserve_rng_state=False)

    def _decoder(self, row: PackedRow) -> Any:
        return self.base.base_model(
            input_ids=row.ids, position_ids=row.positions, use_cache=False, segment_lengths=row.segment_lengths
        )

    def _adapter(self, agent: str) -> FlatAdapter:
        adapter = self.get_submodule(_key(agent))
        assert isinstance(adapter, FlatAdapter)
        return adapter


def _vocab_size(base: Any) -> int:
    return int(base.get_input_embeddings().num_embeddings)


def _samples(vocab_size: int) -> list[list[int]]:
    return [[(7919 * i + 104_729 * length) % vocab_size for i in range(length)] for length in (24, 12)]


@torch.no_grad()
def _own_logprobs(base: Any, ids: Sequence[int]) -> Tensor:
    """log π [T−1] of ``ids`` [T] by the model's own forward: eager attention, full logits."""
    logits: Tensor = base(input_ids=torch.tensor([ids]), use_cache=False).logits[0, :-1]
    return logits.float().log_softmax(-1).gather(1, torch.tensor(ids[1:])[:, None])[:, 0]


@torch.no_grad()
def _check_route(policy: PackedPolicy, samples: Sequence[Sequence[int]], expected: Tensor) -> None:
    """Two sequences in one row must get the logprobs that the model itself gives each of them alone."""
    agent, device = next(iter(policy.adapters)), policy.device
    found, _ = policy(pack_row([teacher_forced(agent, ids) for ids in samples], device))
    off, bound = float((found - expected).abs().mean()), _ROUNDING[policy.base.dtype]
    if not off <= bound:
        raise TrainerError(
            f"{type(policy.base).__name__} cannot be trained here: packed logprobs differ from the model's own by {off:.4f} "
            f"on average (bound {bound}); it may scale or cap its logits, or not separate segments"
        )


def _key(agent: str) -> str:
    """A submodule name that no attribute of nn.Module has, whatever the agent is called."""
    return f"adapter_{agent}"
