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
from selfplay.training.rows import PackedRow, teacher_forced_row

_NUM_CHECKED_TOKENS = 8


def load_base(folder: Path | str, dtype: torch.dtype) -> Any:
    """The frozen causal LM in ``folder``, on the CPU, ready for packed rows. Nothing is fetched, no code of it runs."""
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    attention.register()
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=dtype, attn_implementation=attention.NAME, local_files_only=True, use_safetensors=True
    )
    return model.requires_grad_(False).eval()


class PackedPolicy(nn.Module):
    """Base, adapters and head as one module, so that FSDP's hooks on the root see one forward from ids to logprobs."""

    def __init__(self, base: Any, lora: LoraConfig, agents: Sequence[str], *, seed: int) -> None:
        super().__init__()
        check_head(base)
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
        return int(self.base.get_input_embeddings().num_embeddings)

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
        return frozen_head_logprobs(
            hidden[row.predicted_from], weight, row.targets, inv_temperature=inv_temperature
        )

    @torch.no_grad()
    def teacher_forced(self, agent: str, ids: Sequence[int]) -> list[float]:
        """log π [T−1] of ``ids`` [T] under the agent, at temperature 1, by the same route as in training."""
        if len(ids) < 2 or agent not in self._agents:
            raise TrainerError(f"cannot probe {len(ids)} tokens of agent {agent!r}: need 2 tokens of a trained agent")
        logprobs, _ = self(teacher_forced_row(agent, ids, self.device))
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


@torch.no_grad()
def check_head(base: Any) -> None:
    """Raise `TrainerError` unless the model's logits are its last hidden state times the head's weight, and no more.

    Some architectures scale, cap or bias their logits; training such a model as if they did not would be silently wrong.
    """
    head = base.get_output_embeddings()
    ids = torch.arange(_NUM_CHECKED_TOKENS)[None] % base.config.get_text_config().vocab_size
    inputs = {"input_ids": ids, "position_ids": torch.arange(_NUM_CHECKED_TOKENS)[None], "use_cache": False}
    theirs = base(**inputs, segment_lengths=(_NUM_CHECKED_TOKENS,)).logits
    ours = base.base_model(**inputs, segment_lengths=(_NUM_CHECKED_TOKENS,)).last_hidden_state @ head.weight.t()
    if theirs.shape != ours.shape or not torch.allclose(theirs, ours, rtol=1e-2, atol=1e-2 * float(ours.abs().max())):
        raise TrainerError(
            f"{type(base).__name__} changes its logits after the output head (scale, cap or bias): it cannot be trained"
        )


def _key(agent: str) -> str:
    """A submodule name that no attribute of nn.Module has, whatever the agent is called."""
    return f"adapter_{agent}"
