"""Agents that train every parameter of a small model: embeddings, projections, norms and head, each agent a whole set of its own.

In: a frozen model. Out: for each agent a `WholeModel`, which starts as a copy of the base, and modules that compute each run of
tokens with the parameters of the agent that owns it. The base itself never changes: tokens of nobody, and a reference without
an agent, are computed by it. A version leaves as PEFT's ``modules_to_save``, so that peft loads it as it loads any adapter.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from selfplay.errors import ConfigError, TrainerError
from selfplay.training.flat import PEFT_PREFIX, ActiveRow, AgentParameters
from selfplay.types import Scalar

NO_TARGETS = "dummy-target-modules"
"""How peft says that an adapter has no low-rank matrices."""

Weights = dict[str, Tensor]
"""Parameter name within its module → value."""


@dataclass(frozen=True, kw_only=True)
class FullLayout:
    """Every parameter of a model, in module order, each once."""

    parameters: tuple[tuple[str, tuple[int, ...]], ...]
    """(name in the causal LM, shape)."""
    tied: tuple[tuple[str, str], ...] = ()
    """(other name, name) of parameters that two modules share, such as an output head that is the embedding."""

    rank = 0
    scale = 1.0
    settings = ("the model's parameters", "the model")

    @property
    def names(self) -> tuple[str, ...]:
        """PEFT tensor names, in flat order."""
        return tuple(PEFT_PREFIX + name for name, _ in self.parameters)

    @property
    def shapes(self) -> tuple[tuple[int, ...], ...]:
        return tuple(shape for _, shape in self.parameters)

    @property
    def sizes(self) -> tuple[int, ...]:
        return tuple(math.prod(shape) for shape in self.shapes)

    @property
    def modules(self) -> list[str]:
        """Names of the modules that have parameters; one that only shares another's is none of them."""
        return list(dict.fromkeys(name.rpartition(".")[0] for name, _ in self.parameters))

    def adapter_config(self) -> dict[str, Scalar | list[str]]:
        """The fields of PEFT's adapter_config.json that describe this layout."""
        config: dict[str, Scalar | list[str]] = {
            "r": 1, "lora_alpha": 1, "target_modules": NO_TARGETS, "modules_to_save": self.modules,
        }  # fmt: skip
        return config | {"ensure_weight_tying": True} if self.tied else config


def find_full_layout(model: nn.Module) -> FullLayout:
    """All parameters of ``model``. Raises `ConfigError` for a module that cannot be computed token by token per agent."""
    unique = [(name, tuple(p.shape)) for name, p in model.named_parameters()]
    first = {id(p): name for name, p in model.named_parameters()}
    every = [(name, first[id(p)]) for name, p in model.named_parameters(remove_duplicate=False)]
    layout = FullLayout(parameters=tuple(unique), tied=tuple((other, name) for other, name in every if other != name))
    for name in layout.modules:
        module = model.get_submodule(name)
        known = isinstance(module, nn.Linear | nn.Embedding) or type(module).__name__.endswith("Norm")
        if not known or next(module.children(), None) is not None:
            raise ConfigError(
                f"train.parameters=full: {name} is a {type(module).__name__}; only embeddings, linear layers and norms can be an "
                "agent's own: use train.parameters=lora"
            )
    return layout


class WholeModel(AgentParameters):
    """One agent's ``flat`` [numel] fp32: all parameters of the model, and views of them."""

    layout: FullLayout

    @classmethod
    def create(cls, layout: FullLayout, model: nn.Module) -> WholeModel:
        """A copy of ``model``: the agent starts as the base, bit for bit."""
        return cls(layout, torch.cat([p.detach().float().flatten() for p in model.parameters()]))

    def parts(self, flat: Tensor | None = None) -> dict[str, Weights]:
        """Module → its parameters; those that are shared stand at each of their modules."""
        tensors = self.split(self.flat if flat is None else flat)
        values = dict(zip((name for name, _ in self.layout.parameters), tensors, strict=True))
        values |= {other: values[name] for other, name in self.layout.tied}
        parts: dict[str, Weights] = {}
        for name, value in values.items():
            module, _, last = name.rpartition(".")
            parts.setdefault(module, {})[last] = value
        return parts

    def tensors(self) -> dict[str, Tensor]:
        """By PEFT name; what is shared under each of its names, as peft wants it."""
        out = super().tensors()
        return out | {PEFT_PREFIX + other: out[PEFT_PREFIX + name] for other, name in self.layout.tied}


def attach(model: nn.Module, layout: FullLayout, row: ActiveRow[Weights], *, head: str) -> None:
    """Let every module of the layout compute the active row's runs with their agents' parameters.

    ``head``, the output layer, stays as it is: logits are computed from its parameters where actions are.
    """
    for name in layout.modules:
        if name != head:
            module = model.get_submodule(name)
            twin = copy.deepcopy(module).to("meta")  # says how to compute, and holds nothing to compute with
            module.forward = partial(_forward, module.forward, twin, next(module.parameters()).dtype, name, row)


def _forward(
    bare: Callable[[Tensor], Tensor], twin: nn.Module, dtype: torch.dtype, name: str, row: ActiveRow[Weights], x: Tensor
) -> Tensor:
    """x [1, T, ...] → [1, T, ...]: runs of agents by their parameters in the base's dtype, what is between them by the base."""
    length = max((run.end for run in row.runs), default=x.shape[1])
    if x.dim() < 2 or x.shape[0] != 1 or x.shape[1] < length:
        raise TrainerError(
            f"{name} is asked for {tuple(x.shape)}, not for the {length} tokens of a row: cannot be trained"
        )
    out, done = list[Tensor](), 0
    for run, weights in row.parts_of(name):
        if run.start > done:
            out.append(bare(x[:, done : run.start]))
        cast: dict[str, Any] = {n: w.to(dtype) for n, w in weights.items()}
        out.append(functional_call(twin, cast, (x[:, run.start : run.end],)))
        done = run.end
    if done < x.shape[1]:
        out.append(bare(x[:, done:]))
    return out[0] if len(out) == 1 else torch.cat(out, dim=1)
