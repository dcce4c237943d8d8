"""What an agent trains, as one flat fp32 vector: clipping, the optimizer, a checkpoint and an all-reduce each touch one tensor
instead of hundreds.

In: a layout, which says what the vector holds. Out: an `AgentParameters` whose tensors are views into the vector, by PEFT name
for the store and the engines, by module for the forward pass. A LoRA adapter (`lora.py`) and a whole model (`full.py`) are two
layouts. `ActiveRow` is where the model's modules look up, while a row is computed, whose tokens are where.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

import torch
from torch import Tensor, nn

from selfplay.errors import TrainerError
from selfplay.types import Scalar

PEFT_PREFIX = "base_model.model."
Part = TypeVar("Part")


class Layout(Protocol):
    """Which tensors an agent has and where they lie in its flat vector."""

    @property
    def rank(self) -> int:
        """LoRA rank; 0: no matrices, whole modules."""
        ...

    @property
    def scale(self) -> float:
        """Factor of B A; 1 for whole modules."""
        ...

    @property
    def names(self) -> tuple[str, ...]:
        """PEFT tensor names, in flat order."""
        ...

    @property
    def shapes(self) -> tuple[tuple[int, ...], ...]: ...

    @property
    def sizes(self) -> tuple[int, ...]: ...

    @property
    def settings(self) -> tuple[str, str]:
        """What decides the names and the shapes, for messages."""
        ...

    def adapter_config(self) -> dict[str, Scalar | list[str]]:
        """The fields of PEFT's adapter_config.json that describe this layout."""
        ...


class AgentParameters(nn.Module):
    """One agent's ``flat`` [numel] fp32, and its tensors as views."""

    def __init__(self, layout: Layout, flat: Tensor) -> None:
        super().__init__()
        self.layout = layout
        self.flat = nn.Parameter(flat)

    def parts(self, flat: Tensor | None = None) -> Mapping[str, Any]:
        """Module name → what the agent has for it, attached to the graph: gradients arrive in ``flat.grad``.

        Of another vector [numel] of this layout where one is given.
        """
        raise NotImplementedError

    def tensors(self) -> dict[str, Tensor]:
        """The tensors by PEFT name, detached; they share memory with ``flat``."""
        with torch.no_grad():
            return dict(zip(self.layout.names, (t.detach() for t in self.split(self.flat)), strict=True))

    def split(self, flat: Tensor) -> list[Tensor]:
        """``flat`` [numel] as the layout's tensors, in order."""
        parts = torch.split(flat, list(self.layout.sizes))
        return [part.view(shape) for part, shape in zip(parts, self.layout.shapes, strict=True)]

    @torch.no_grad()
    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Take over the tensors of a stored version; raises `TrainerError` naming the first that does not fit."""
        ours, (named_by, shaped_by) = self.tensors(), self.layout.settings
        odd = sorted(ours.keys() ^ tensors.keys())
        if odd:
            raise TrainerError(f"adapter tensors differ from {named_by}, for example {odd[0]!r}")
        for name, tensor in ours.items():
            if tensor.shape != tensors[name].shape:
                raise TrainerError(
                    f"adapter tensor {name!r} has shape {tuple(tensors[name].shape)}, "
                    f"{shaped_by} needs {tuple(tensor.shape)}"
                )
            tensor.copy_(tensors[name])


@dataclass(frozen=True)
class Run:
    """Tokens ``[start, end)`` of a packed row belong to ``agent``."""

    agent: str
    start: int
    end: int


class ActiveRow(Generic[Part]):
    """What the modules of a model look up while a row is computed: whose tokens are where, and what the agents have.

    It stays as it is until the next row, because recomputed activations look it up during the backward pass.
    """

    def __init__(self) -> None:
        self.runs: tuple[Run, ...] = ()
        self.wanted: Tensor | None = None
        """[W] long, ascending: the tokens whose last hidden state is looked at; None: all."""
        self._wanted_runs: tuple[Run, ...] = ()
        self._parts: dict[str, Mapping[str, Part]] = {}

    def set(
        self, runs: Sequence[Run], parts: Mapping[str, Mapping[str, Part]], wanted: Tensor | None = None,
        wanted_runs: Sequence[Run] = (),
    ) -> None:  # fmt: skip
        """Tokens outside ``runs`` are computed by the bare base. ``wanted_runs``: the same over [0, W) of ``wanted``."""
        self.runs, self._parts = tuple(runs), dict(parts)
        self.wanted, self._wanted_runs = wanted, tuple(wanted_runs)

    @contextmanager
    def thinned(self) -> Iterator[None]:
        """Inside, modules are given the wanted tokens only."""
        whole, self.runs = self.runs, self._wanted_runs
        try:
            yield
        finally:
            self.runs = whole

    def parts_of(self, module: str) -> list[tuple[Run, Part]]:
        """The runs whose agents have something for ``module``, in order."""
        found = [(run, self._parts[run.agent].get(module)) for run in self.runs]
        return [(run, part) for run, part in found if part is not None]
