"""LoRA agents as flat parameters: one fp32 vector per agent that holds all its A and B matrices.

In: the projections of a frozen model, rank, alpha. Out: for each agent a `FlatAdapter`, and `LoraLinear` in the model.
Agents may differ in rank, scale and projections. The order of an agent's matrices is its `LoraLayout`: projection by projection, A [r, in] before B [out, r].
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from selfplay.config.schema import LoraConfig
from selfplay.errors import ConfigError
from selfplay.training.flat import PEFT_PREFIX, ActiveRow, AgentParameters
from selfplay.training.segment_lora import SegmentLora
from selfplay.types import Scalar, derive_seed


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

    @property
    def settings(self) -> tuple[str, str]:
        return "lora.targets", f"lora.rank={self.rank}"

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


Pair = tuple[Tensor, Tensor, float]
"""A [r, in], B [out, r], scale."""


class FlatAdapter(AgentParameters):
    """One agent's LoRA: ``flat`` [numel] fp32, and its matrices as views."""

    layout: LoraLayout

    @classmethod
    def create(cls, layout: LoraLayout, *, seed: int, agent: str) -> FlatAdapter:
        """A fresh adapter: A uniform in ±1/√in (PEFT's Kaiming init), B zero, so the agent starts as the base model."""
        generator = torch.Generator().manual_seed(derive_seed(seed, "adapter", agent))
        return cls(layout, torch.cat(list(_initial(layout, generator))))

    def parts(self, flat: Tensor | None = None) -> dict[str, Pair]:
        """Projection → its A and B and their scale."""
        matrices = self.split(self.flat if flat is None else flat)
        names = (p.name for p in self.layout.projections)
        return {n: (a, b, self.layout.scale) for n, a, b in zip(names, matrices[::2], matrices[1::2], strict=True)}


def _initial(layout: LoraLayout, generator: torch.Generator) -> Iterable[Tensor]:
    for p in layout.projections:
        bound = p.in_features**-0.5
        yield torch.empty(layout.rank * p.in_features).uniform_(-bound, bound, generator=generator)
        yield torch.zeros(layout.rank * p.out_features)


class LoraLinear(nn.Module):
    """A frozen nn.Linear plus, for each run of tokens, the low-rank update of the agent that owns them, if it has one."""

    def __init__(self, linear: nn.Linear, name: str, row: ActiveRow[Pair]) -> None:
        super().__init__()
        self.weight, self.bias = linear.weight, linear.bias
        self._name, self._row = name, row

    def forward(self, x: Tensor) -> Tensor:
        """x [..., T, in] → [..., T, out]; T runs over the tokens of the active row."""
        used = self._row.parts_of(self._name)
        bounds = tuple((r.start, r.end, scale) for r, (_, _, scale) in used)
        matrices = [m for _, (a, b, _) in used for m in (a, b)]
        out: Tensor = SegmentLora.apply(x, self.weight, self.bias, bounds, *matrices)  # type: ignore[no-untyped-call]
        return out


def attach(model: nn.Module, layouts: Iterable[LoraLayout], row: ActiveRow[Pair]) -> None:
    """Replace every projection of any of the layouts by a `LoraLinear` on the same weights."""
    for name in dict.fromkeys(p.name for layout in layouts for p in layout.projections):
        path, _, last = name.rpartition(".")
        parent = model.get_submodule(path)
        setattr(parent, last, LoraLinear(getattr(parent, last), name, row))
