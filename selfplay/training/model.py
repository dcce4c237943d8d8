"""The policy that is trained: one frozen causal LM, each agent's flat parameters, rows of packed segments.

In: a model folder, agents, a `PackedRow`. Out: log π and entropy of each action token, and how far π is from a reference.
All agents of a row are computed in one pass over the base; logits exist only where actions are.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint

from selfplay.config.schema import LoraConfig
from selfplay.errors import TrainerError
from selfplay.training import attention, full, lora
from selfplay.training.flat import ActiveRow, AgentParameters
from selfplay.training.head import HeadOutput, frozen_head, join, trained_head
from selfplay.training.last_layer import thin_out
from selfplay.training.rows import PackedRow, pack_row, teacher_forced
from selfplay.training.trunk import Trunk

_ROUNDING = {torch.float32: 0.002, torch.bfloat16: 0.15}
"""Mean |Δlogprob| between two orders of computing the same thing."""


Adapters = Mapping[str, LoraConfig] | Mapping[str, None]
"""Agent → its LoRA adapter; None: every parameter of the model, for all agents or for none."""


def load_policy(folder: Path | str, *, dtype: torch.dtype, adapters: Adapters, seed: int) -> PackedPolicy:
    """The policy with each agent of ``adapters`` as it starts, on the CPU. Nothing is fetched, and no code of the model folder runs.

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
    shaken = _shaken(base) if None in adapters.values() else {}
    expected_shaken = [_own_logprobs(base, ids, shaken) for ids in samples] if shaken else []
    base.set_attn_implementation(attention.NAME)
    policy = PackedPolicy(base, adapters, seed=seed)
    _check_route(policy, samples, expected)
    if shaken:
        _check_shaken(policy, samples, expected_shaken, shaken)
    return policy


Reference = Mapping[str, Tensor]
"""Agent → flat vector [numel] it is compared with; an agent that is missing is compared with the bare base."""


@dataclass(frozen=True)
class RowOutput:
    """Of a row's M distinct actions."""

    head: HeadOutput
    reference_logprobs: Tensor | None
    """[M], without gradient."""
    reference_hidden: Tensor | None
    """[M, D], without gradient: for further passes over the row."""
    trunk: Tensor | None
    """[1, T, D], without gradient, for further passes: what the layers below all adapters found; None where there are none."""


class PackedPolicy(nn.Module):
    """Base, adapters and head as one module, so that FSDP's hooks on the root see one forward from ids to logprobs."""

    def __init__(self, base: Any, adapters: Adapters, *, seed: int) -> None:
        super().__init__()
        self.base = base
        self._agents = tuple(sorted(adapters))
        self._row: ActiveRow[Any] = ActiveRow()
        self._head = next(name for name, module in base.named_modules() if module is base.get_output_embeddings())
        """Name of the output layer."""
        loras = {agent: settings for agent, settings in sorted(adapters.items()) if settings is not None}
        self._trains_head = not loras
        for agent, own in (self._attach_loras(loras, seed) if loras else self._attach_whole()).items():
            self.add_module(_key(agent), own)
        thin_out(self.layers[-1], self._row)

    @property
    def adapters(self) -> Mapping[str, AgentParameters]:
        """Agent → what it trains, by name."""
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

    def forward(
        self,
        row: PackedRow,
        inv_temperature: float = 1.0,
        *,
        reference: Reference | None = None,
        reference_hidden: Tensor | None = None,
        trunk: Tensor | None = None,
        entropy_gradient: bool = False,
    ) -> RowOutput:
        """What the row's M distinct actions have under the agents, and under ``reference`` where it is given.

        ``reference_hidden`` and ``trunk`` are what an earlier pass over the row found: they are not computed again.

        One row at a time: the backward pass of a row must be over before the next row goes forward.
        """
        before = reference_hidden
        self._trunk.begin(trunk)
        if before is None and reference is not None:
            before = self._reference_hidden(row, reference)
        parts = {agent: self._adapter(agent).parts() for agent in {r.agent for r in row.runs}}
        self._row.set(row.runs, parts, row.wanted, row.wanted_runs)
        hidden = self._decoder(row).last_hidden_state[0][row.predicted_from]
        head = self._own_heads if self._trains_head else self._base_head
        out, theirs = head(row, hidden, before, reference or {}, inv_temperature, entropy_gradient)
        return RowOutput(out, theirs, before, self._trunk.hidden)

    def _base_head(
        self, row: PackedRow, hidden: Tensor, before: Tensor | None, reference: Reference, inv_temperature: float,  # noqa: ARG002
        entropy_gradient: bool,
    ) -> tuple[HeadOutput, Tensor | None]:  # fmt: skip
        """Through the head of the base, which nobody trains; and the reference's log π [M] where there is one."""
        weight = self.base.get_output_embeddings().weight
        out = frozen_head(
            hidden, weight, row.targets, inv_temperature=inv_temperature, reference=before,
            entropy_gradient=entropy_gradient, kept=row.kept,
        )  # fmt: skip
        if before is None:
            return out, None
        with torch.no_grad():
            theirs = frozen_head(before, weight, row.targets, inv_temperature=inv_temperature, kept=row.kept)
        return out, theirs.logprobs

    def _own_heads(
        self, row: PackedRow, hidden: Tensor, before: Tensor | None, reference: Reference, inv_temperature: float,
        entropy_gradient: bool,
    ) -> tuple[HeadOutput, Tensor | None]:  # fmt: skip
        """The same with each agent's actions through its own head, and through that of its reference."""
        outs, theirs = list[HeadOutput](), list[Tensor]()
        for (run, own), at in zip(self._row.parts_of(self._head), row.actions_by_run(), strict=True):
            compute = partial(
                trained_head, targets=row.targets[at], kept=None if row.kept is None else row.kept[at],
                inv_temperature=inv_temperature,
            )  # fmt: skip
            past = None if before is None else (before[at], self._reference_head(run.agent, reference))
            outs.append(compute(hidden[at], own["weight"], reference=past, entropy_gradient=entropy_gradient))
            if past is not None:
                with torch.no_grad():
                    theirs.append(compute(*past).logprobs)
        return join(outs), torch.cat(theirs) if theirs else None

    def _reference_head(self, agent: str, reference: Reference) -> Tensor:
        """[V, D]."""
        flat = reference.get(agent)
        own = None if flat is None else self._adapter(agent).parts(flat)[self._head]["weight"]
        weight: Tensor = self.base.get_output_embeddings().weight if own is None else own
        return weight

    @torch.no_grad()
    def _reference_hidden(self, row: PackedRow, reference: Reference) -> Tensor:
        """[M, D] of the agents as ``reference`` has them; of the bare base for agents that it does not have."""
        runs, wanted_runs = ([r for r in of if r.agent in reference] for of in (row.runs, row.wanted_runs))
        parts = {agent: self._adapter(agent).parts(flat) for agent, flat in reference.items()}
        self._row.set(runs, parts, row.wanted, wanted_runs)
        hidden: Tensor = self._decoder(row).last_hidden_state[0][row.predicted_from]
        return hidden

    @torch.no_grad()
    def probe(self, agent: str, ids: Sequence[int]) -> list[float]:
        """log π [T−1] of ``ids`` [T] under the agent, at temperature 1, by the same route as in training."""
        if len(ids) < 2 or agent not in self._agents:
            raise TrainerError(f"cannot probe {len(ids)} tokens of agent {agent!r}: need 2 tokens of a trained agent")
        out: RowOutput = self(pack_row([teacher_forced(agent, ids)], self.device))
        return [float(x) for x in out.head.logprobs.tolist()]

    def recompute_activations(self) -> None:
        """Keep only each layer's input in the forward pass. Call before sharding."""
        for layer in self.layers:
            layer.forward = partial(checkpoint, layer.forward, use_reentrant=False, preserve_rng_state=False)

    def _decoder(self, row: PackedRow) -> Any:
        return self.base.base_model(input_ids=row.ids, position_ids=row.positions, use_cache=False, chains=row.chains)

    def _attach_loras(self, loras: Mapping[str, LoraConfig], seed: int) -> Mapping[str, AgentParameters]:
        layouts = {agent: lora.find_layout(self.base, settings) for agent, settings in loras.items()}
        self._trunk = Trunk(list(self.layers)[: _first_layer(layouts.values())])
        lora.attach(self.base, layouts.values(), self._row)
        return {a: lora.FlatAdapter.create(layout, seed=seed, agent=a) for a, layout in layouts.items()}

    def _attach_whole(self) -> Mapping[str, AgentParameters]:
        layout = full.find_full_layout(self.base)
        self._trunk = Trunk([])
        own = {agent: full.WholeModel.create(layout, self.base) for agent in self._agents}
        full.attach(self.base, layout, self._row, head=self._head)
        return own

    def _adapter(self, agent: str) -> AgentParameters:
        adapter = self.get_submodule(_key(agent))
        assert isinstance(adapter, AgentParameters)
        return adapter


def _first_layer(layouts: Iterable[lora.LoraLayout]) -> int:
    """How many layers lie below every adapter."""
    return min(layout.layers[0] if layout.layers else 0 for layout in layouts)


def _vocab_size(base: Any) -> int:
    return int(base.get_input_embeddings().num_embeddings)


def _samples(vocab_size: int) -> list[list[int]]:
    return [[(7919 * i + 104_729 * length) % vocab_size for i in range(length)] for length in (24, 12)]


@torch.no_grad()
def _own_logprobs(base: Any, ids: Sequence[int], parameters: Mapping[str, Tensor] | None = None) -> Tensor:
    """log π [T−1] of ``ids`` [T] by the model's own forward: eager attention, full logits; with other ``parameters``."""
    options = {"input_ids": torch.tensor([ids]), "use_cache": False}
    logits: Tensor = functional_call(base, dict(parameters or {}), (), options).logits[0, :-1]
    return logits.float().log_softmax(-1).gather(1, torch.tensor(ids[1:])[:, None])[:, 0]


@torch.no_grad()
def _check_route(policy: PackedPolicy, samples: Sequence[Sequence[int]], alone: Sequence[Tensor]) -> None:
    """Two sequences in one row must get the logprobs that the model itself gives each of them alone."""
    agent, device = next(iter(policy.adapters)), policy.device
    row = pack_row([teacher_forced(agent, ids) for ids in samples], device)
    found = policy(row).head.logprobs[row.picks]
    expected = torch.cat([alone[i] for i in sorted(range(len(samples)), key=lambda i: list(samples[i]))])
    off, bound = float((found - expected).abs().mean()), _ROUNDING[policy.base.dtype]
    if not off <= bound:
        raise TrainerError(
            f"{type(policy.base).__name__} cannot be trained here: packed logprobs differ from the model's own by {off:.4f} "
            f"on average (bound {bound}); it may scale or cap its logits, or not separate segments"
        )


def _shaken(base: Any) -> dict[str, Tensor]:
    """Every parameter with a tenth of noise, by name."""
    generator = torch.Generator().manual_seed(0)
    out = {}
    for name, p in base.named_parameters():
        noise = torch.randn(p.shape, generator=generator) * 0.1
        out[name] = (p.float() + noise * (float(p.float().square().mean().sqrt()) or 1.0)).to(p.dtype)
    return out


@torch.no_grad()
def _check_shaken(
    policy: PackedPolicy, samples: Sequence[Sequence[int]], alone: Sequence[Tensor], shaken: Mapping[str, Tensor]
) -> None:
    """An agent whose every parameter differs from the base's must be computed as the model itself would be with them."""
    flat = next(iter(policy.adapters.values())).flat
    before = flat.detach().clone()
    flat.copy_(torch.cat([value.float().flatten() for value in shaken.values()]))
    _check_route(policy, samples, alone)
    flat.copy_(before)


def _key(agent: str) -> str:
    """A submodule name that no attribute of nn.Module has, whatever the agent is called."""
    return f"adapter_{agent}"
