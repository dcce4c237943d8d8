"""The policy: a frozen base model with one adapter per agent, from packed rows to logprobs of actions.

    Row ─► embeddings ─► decoder layers (SegmentLinear, packed attention) ─► hidden states at actions only ─► frozen head
                                                                                                   └─► logprobs, entropies [N]

The base is any causal language model of transformers that keeps its projections in ``nn.Linear``, passes keyword
arguments on to attention, and whose logits are its head applied to the last hidden state. Whether one does is found out
at load, by comparing this route with the model's own forward; a model that differs is refused.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from selfplay.config.schema import LoraConfig
from selfplay.errors import TrainerError
from selfplay.training import attention
from selfplay.training.adapter import FlatAdapter, fresh_adapter
from selfplay.training.head import frozen_head_logprobs
from selfplay.training.lora import ActiveAdapters, adapt
from selfplay.training.rows import Row, pack_row
from selfplay.types import Segment

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
MAX_MEAN_DIFFERENCE = {"float32": 0.002, "bfloat16": 0.15}
"""Mean |Δlogprob| between this route and the model's own that is still rounding, by dtype of the base."""


class PolicyModel(nn.Module):
    """Base and adapters under one root module, so that sharding sees embeddings and head inside one forward."""

    def __init__(self, base: nn.Module, adapters: Mapping[str, FlatAdapter], active: ActiveAdapters) -> None:
        super().__init__()
        self.base: Any = base
        self._registered = nn.ModuleList(adapters.values())  # not by agent name: a name may be that of a method
        self.adapters = dict(adapters)
        self.vocab_size = int(base.get_input_embeddings().weight.shape[0])  # type: ignore[operator]
        self._active = active

    def forward(self, row: Row, temperature: float) -> tuple[Tensor, Tensor]:
        """(logprobs [N], entropies [N]) of the row's actions at ``temperature``; gradients reach the row's adapters."""
        self._active.ranges = tuple(row.tokens.values())
        self._active.matrices = [self.adapters[agent].matrices() for agent in row.tokens]
        hidden = self.base.base_model(
            input_ids=row.ids[None], position_ids=row.positions[None], segment_lengths=row.lengths, use_cache=False
        ).last_hidden_state[0]
        head = self.base.get_output_embeddings()
        return frozen_head_logprobs(
            hidden[row.predictors], head.weight, head.bias, row.targets, temperature=temperature
        )

    def release(self) -> None:
        """Forget the last row's views, after its backward pass."""
        self._active.ranges, self._active.matrices = (), []

    @property
    def vocab_size(self) -> int:
        """Token ids the embedding knows."""
        return int(self.base.get_input_embeddings().num_embeddings)

    @property
    def layers(self) -> nn.ModuleList:
        """The decoder layers."""
        layers: nn.ModuleList = self.base.base_model.layers
        return layers


def load_policy(
    folder: Path,
    *,
    dtype: str,
    lora: LoraConfig,
    agents: Sequence[str],
    run_seed: int,
    device: torch.device,
    activation_checkpointing: bool = False,
) -> PolicyModel:
    """The policy with fresh adapters. Raises `TrainerError` for a model this trainer would compute wrongly."""
    base = _load_base(folder, dtype).to(device)
    samples = _check_samples(base)
    expected = torch.cat([_own_logprobs(base, ids) for ids in samples])
    base.set_attn_implementation(attention.NAME)
    active = ActiveAdapters(scale=lora.alpha / lora.rank)
    layout = adapt(base, lora.targets, active)
    adapters = {a: fresh_adapter(layout, lora.rank, run_seed=run_seed, agent=a).to(device) for a in sorted(agents)}
    policy = PolicyModel(base, adapters, active)
    _check_route(policy, samples, expected, MAX_MEAN_DIFFERENCE[dtype])
    if activation_checkpointing:
        _checkpoint_layers(policy.layers)
    return policy


def shard_base(policy: PolicyModel, device_type: str) -> None:
    """FSDP2: shard the frozen base over all ranks, layer by layer; the adapters stay whole on each rank."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh(device_type, (torch.distributed.get_world_size(),))
    for layer in policy.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(policy, mesh=mesh, ignored_params={a.flat for a in policy.adapters.values()})


def _load_base(folder: Path, dtype: str) -> Any:
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    attention.register()
    base = AutoModelForCausalLM.from_pretrained(
        folder, dtype=DTYPES[dtype], attn_implementation="eager", local_files_only=True, use_safetensors=True,
        trust_remote_code=False,
    )  # fmt: skip
    base.requires_grad_(False)
    base.eval()  # no dropout: the policy that is trained is the policy that played
    if not isinstance(getattr(base.base_model, "layers", None), nn.ModuleList):
        raise TrainerError(f"{type(base).__name__} has no list of decoder layers at base_model.layers: not supported")
    return base


def _checkpoint_layers(layers: nn.ModuleList) -> None:
    """Recompute each layer's activations in the backward pass. There is no dropout, so no random state to keep."""
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    for i, layer in enumerate(layers):
        layers[i] = checkpoint_wrapper(layer, preserve_rng_state=False)


def _check_samples(base: Any) -> list[list[int]]:
    vocab_size = base.get_input_embeddings().weight.shape[0]
    return [[(7919 * i + 104_729 * length) % vocab_size for i in range(length)] for length in (24, 12)]


@torch.no_grad()
def _own_logprobs(base: Any, ids: list[int]) -> Tensor:
    """Logprobs of ``ids[1:]`` by the model's own forward, eager attention and full logits."""
    tokens = torch.tensor(ids, device=base.device)
    logits: Tensor = base(input_ids=tokens[None], use_cache=False).logits[0, :-1]
    return logits.float().log_softmax(-1).gather(1, tokens[1:, None])[:, 0]


@torch.no_grad()
def _check_route(policy: PolicyModel, samples: list[list[int]], expected: Tensor, bound: float) -> None:
    """Compare with the model's own forward, two segments in one row, before anything is trained on."""
    agent = next(iter(policy.adapters))
    segments = [
        Segment(
            episode_id="check", agent=agent, seat="-", ids=tuple(ids), mask=(0, *[1] * (len(ids) - 1)),
            logprobs=(0.0,) * len(ids), advantages=(0.0,) * len(ids), versions=(0, 0),
        )
        for ids in samples
    ]  # fmt: skip
    row = pack_row(segments, {agent}, device=expected.device, vocab_size=policy.vocab_size)
    assert row is not None  # the segments are the agent's
    found, _ = policy(row, 1.0)
    policy.release()
    difference = float((found - expected).abs().mean())
    if not difference <= bound:
        raise TrainerError(
            f"{type(policy.base).__name__} is not supported by the trainer: packed logprobs differ from the model's own by "
            f"{difference:.4f} on average (bound {bound}); its attention or its logits need more than this trainer computes"
        )
