"""LoRA agents as flat parameters: one fp32 vector per agent that holds all its A and B matrices.

In: the projections of a frozen model, rank, alpha. Out: for each agent a `FlatAdapter` whose matrices are views into one
parameter, so that clipping, the optimizer, a checkpoint and an all-reduce each touch one tensor instead of hundreds.
Agents may differ in rank, scale and projections. The order of an agent's matrices is its `LoraLayout`: projection by projection, A [r, in] before B [out, r].
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from selfplay.config.schema import LoraConfig
from selfplay.errors import ConfigError, TrainerError
from selfplay.training.segment_lora import SegmentLora
from selfplay.types import Scalar, derive_seed

PEFT_PREFIX = "base_model.model."


@dataclass(frozen=True, kw_only=True)
class Projection:
    """One nn.Linear that gets an adapter."""

    name: str
    """Module name in the causal LM, for example ``model.layers.0.self_attn.q_proj``."""
    in_features: int
    out_features: int


@dataclass(frozen=True, kw_only=True)
class LoraLayout:
    """Which matrices an agent's adapter has and where they lie in its flat vector."""

    rank: int
    alpha: float
    rslora: bool = False
    projections: tuple[Projection, ...]
    layers: tuple[int, ...] = ()
    """The only layers that have them; empty: all."""

    @property
    def scale(self) -> float:
        return self.alpha / (self.rank**0.5 if self.rslora else self.rank)

    @property
    def shapes(self) -> tuple[tuple[int, int], ...]:
        """A [r, in] and B [out, r] of each projection, in flat order."""
        return tuple(s for p in self.projections for s in ((self.rank, p.in_features), (p.out_features, self.rank)))

    @property
    def sizes(self) -> tuple[int, ...]:
        return tuple(rows * columns for rows, columns in self.shapes)

    @property
    def names(self) -> tuple[str, ...]:
        """PEFT tensor names, in flat order."""
        return tuple(f"{PEFT_PREFIX}{p.name}.lora_{m}.weight" for p in self.projections for m in "AB")

    @property
    def targets(self) -> list[str]:
        """Last names of the adapted projections, sorted."""
        return sorted({p.name.rpartition(".")[2] for p in self.projections})

    def adapter_config(self) -> dict[str, Scalar | list[str]]:
        """The fields of PEFT's adapter_config.json that describe this layout. Some layers only are named by a pattern."""
        alpha: Scalar = int(self.alpha) if self.alpha.is_integer() else self.alpha
        modules: Scalar | list[str] = list[str](self.targets)
        if self.layers:
            modules = rf".*\.(?:{'|'.join(map(str, self.layers))})\.(?:.*\.)?(?:{'|'.join(self.targets)})"
        config: dict[str, Scalar | list[str]] = {"r": self.rank, "lora_alpha": alpha, "target_modules": modules}
        return config | {"use_rslora": True} if self.rslora else config


def find_layout(model: nn.Module, config: LoraConfig) -> LoraLayout:
    """The projections of ``model`` that ``lora.targets`` names, in module order; of its last ``lora.layers`` layers.

    Raises `ConfigError` for a target that the model does not have or that is not an nn.Linear.
    """
    found = [(name, m) for name, m in model.named_modules() if name.rpartition(".")[2] in config.targets]
    layers = sorted({_layer(name) for name, _ in found})[-config.layers :] if config.layers else []
    if layers:
        found = [(name, m) for name, m in found if _layer(name) in layers]
    missing = set(config.targets) - {name.rpartition(".")[2] for name, _ in found}
    if missing:
        raise ConfigError(
            f"lora.targets: the model has no projection {', '.join(map(repr, sorted(missing)))}; "
            f"it has {', '.join(_linear_names(model))}"
        )
    return LoraLayout(
        rank=config.rank, alpha=config.alpha, rslora=config.rslora,
        projections=tuple(_projection(name, module) for name, module in found), layers=tuple(layers),
    )  # fmt: skip


def _layer(name: str) -> int:
    """The number of the layer that a module is in: the first number in its name."""
    return next((int(part) for part in name.split(".") if part.isdigit()), 0)


def _projection(name: str, module: nn.Module) -> Projection:
    if type(module) is not nn.Linear:
        raise ConfigError(f"lora.targets: {name} is a {type(module).__name__}, only nn.Linear can get an adapter")
    return Projection(name=name, in_features=module.in_features, out_features=module.out_features)


def _linear_names(model: nn.Module) -> list[str]:
    return sorted({n.rpartition(".")[2] for n, m in model.named_modules() if isinstance(m, nn.Linear)})


Pairs = dict[str, tuple[Tensor, Tensor, float]]
"""Projection name → A [r, in], B [out, r], scale."""


class FlatAdapter(nn.Module):
    """One agent's LoRA: ``flat`` [numel] fp32, and its matrices as views."""

    def __init__(self, layout: LoraLayout, flat: Tensor) -> None:
        super().__init__()
        self.layout = layout
        self.flat = nn.Parameter(flat)

    @classmethod
    def create(cls, layout: LoraLayout, *, seed: int, agent: str) -> FlatAdapter:
        """A fresh adapter: A uniform in ±1/√in (PEFT's Kaiming init), B zero, so the agent starts as the base model."""
        generator = torch.Generator().manual_seed(derive_seed(seed, "adapter", agent))
        return cls(layout, torch.cat(list(_initial(layout, generator))))

    def matrices(self) -> list[Tensor]:
        """A, B, A, B, … in flat order, attached to the graph: their gradients arrive in ``flat.grad``."""
        return self._split(self.flat)

    def pairs(self, flat: Tensor | None = None) -> Pairs:
        """Projection → its A and B and their scale; of another vector [numel] of this layout where one is given."""
        matrices = self._split(self.flat if flat is None else flat)
        names = (p.name for p in self.layout.projections)
        return {n: (a, b, self.layout.scale) for n, a, b in zip(names, matrices[::2], matrices[1::2], strict=True)}

    def _split(self, flat: Tensor) -> list[Tensor]:
        parts = torch.split(flat, list(self.layout.sizes))
        return [part.view(shape) for part, shape in zip(parts, self.layout.shapes, strict=True)]

    def tensors(self) -> dict[str, Tensor]:
        """The matrices by PEFT name, detached; they share memory with ``flat``."""
        with torch.no_grad():
            return dict(zip(self.layout.names, (m.detach() for m in self.matrices()), strict=True))

    @torch.no_grad()
    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Take over the matrices of a PEFT adapter; raises `TrainerError` naming the first that does not fit."""
        ours = self.tensors()
        odd = sorted(ours.keys() ^ tensors.keys())
        if odd:
            raise TrainerError(f"adapter tensors differ from lora.targets, for example {odd[0]!r}")
        for name, matrix in ours.items():
            if matrix.shape != tensors[name].shape:
                raise TrainerError(
                    f"adapter tensor {name!r} has shape {tuple(tensors[name].shape)}, "
                    f"lora.rank={self.layout.rank} needs {tuple(matrix.shape)}"
                )
            matrix.copy_(tensors[name])


def _initial(layout: LoraLayout, generator: torch.Generator) -> Iterable[Tensor]:
    for p in layout.projections:
        bound = p.in_features**-0.5
        yield torch.empty(layout.rank * p.in_features).uniform_(-bound, bound, generator=generator)
        yield torch.zeros(layout.rank * p.out_features)


@dataclass(frozen=True)
class Run:
    """Tokens ``[start, end)`` of a packed row belong to ``agent``."""

    agent: str
    start: int
    end: int


class ActiveRow:
    """What the LoRA linears of a model look up while a row is computed: whose tokens are where, and the matrices.

    It stays as it is until the next row, because recomputed activations look it up during the backward pass.
    """

    def __init__(self) -> None:
        self.runs: tuple[Run, ...] = ()
        self.pairs: dict[str, Pairs] = {}

    def set(self, runs: Sequence[Run], pairs: Mapping[str, Pairs]) -> None:
        """Tokens outside ``runs`` are computed by the bare base."""
        self.runs, self.pairs = tuple(runs), dict(pairs)


class LoraLinear(nn.Module):
    """A frozen nn.Linear plus, for each run of tokens, the low-rank update of the agent that owns them, if it has one."""

    def __init__(self, linear: nn.Linear, name: str, row: ActiveRow) -> None:
        super().__init__()
        self.weight, self.bias = linear.weight, linear.bias
        self._name, self._row = name, row

    def forward(self, x: Tensor) -> Tensor:
        """x [..., T, in] → [..., T, out]; T runs over the tokens of the active row."""
        found = [(r, self._row.pairs[r.agent].get(self._name)) for r in self._row.runs]
        used = [(r, pair) for r, pair in found if pair is not None]
        bounds = tuple((r.start, r.end, scale) for r, (_, _, scale) in used)
        matrices = [m for _, (a, b, _) in used for m in (a, b)]
        out: Tensor = SegmentLora.apply(x, self.weight, self.bias, bounds, *matrices)  # type: ignore[no-untyped-call]
        return out


def attach(model: nn.Module, layouts: Iterable[LoraLayout], row: ActiveRow) -> None:
    """Replace every projection of any of the layouts by a `LoraLinear` on the same weights."""
    for name in dict.fromkeys(p.name for layout in layouts for p in layout.projections):
        path, _, last = name.rpartition(".")
        parent = model.get_submodule(path)
        setattr(parent, last, LoraLinear(getattr(parent, last), name, row))
