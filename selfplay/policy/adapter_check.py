"""What an adapter must look like before it comes near an engine, read from the model's files without loading them.

In: the header of a bucket, and the shapes of the model's weights (from the safetensors headers). Out: nothing, or
`SyncError` naming the first tensor or field that does not fit. An engine that meets a wrong rank, key or shape in the
middle of a step dies or, worse, serves the base model under the adapter's name.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from selfplay.errors import EngineError, SyncError
from selfplay.models.tensor_header import HeaderError, read_tensor_header
from selfplay.wire.messages import BucketHeader

MAX_ALPHA = 1e6
_NAME = re.compile(r"base_model\.model\.(?P<module>[\w.]+)\.lora_(?P<side>[AB])\.weight\Z", re.ASCII)
_WHOLE = re.compile(r"base_model\.model\.[\w.]+\.(weight|bias)\Z", re.ASCII)
_UNSUPPORTED = ("use_dora", "lora_bias", "use_qalora", "fan_in_fan_out")


@dataclass(frozen=True, kw_only=True)
class AdapterRules:
    """What this server's engine can serve."""

    shapes: Mapping[str, tuple[int, ...]]
    """Module name → shape [out, in] of its weight."""
    targets: frozenset[str]
    max_rank: int
    whole_models: bool = False
    """Whether versions may be whole models instead of low-rank matrices; which modules fit only the engine itself can say."""


def rules_of(folder: str, targets: tuple[str, ...], max_rank: int, *, whole_models: bool = False) -> AdapterRules:
    """The rules for the model in ``folder``. Raises `EngineError` when its weights cannot be read."""
    shapes: dict[str, tuple[int, ...]] = {}
    files = sorted(Path(folder).glob("*.safetensors"))
    if not files:
        raise EngineError(f"model folder {folder} has no safetensors weights")
    for path in files:
        shapes |= _shapes(path)
    return AdapterRules(shapes=shapes, targets=frozenset(targets), max_rank=max_rank, whole_models=whole_models)


def check_adapter(header: BucketHeader, rules: AdapterRules) -> None:
    """Raise `SyncError` unless the adapter fits the model and the engine."""
    rank = _check_config(header, rules)
    if header.adapter_config.get("modules_to_save"):
        _check_whole(header, rules)
        return
    sides: dict[str, dict[str, tuple[int, ...]]] = {}
    for name, shape, _ in header.layout:
        match = _NAME.match(name)
        if match is None:
            raise SyncError(f"tensor {name[:120]!r} is not a LoRA matrix (base_model.model.….lora_A|B.weight)")
        sides.setdefault(match["module"], {})[match["side"]] = shape
    if not sides:
        raise SyncError("the adapter has no tensors")
    for module, found in sides.items():
        _check_module(module, found, rank, rules)


def _check_whole(header: BucketHeader, rules: AdapterRules) -> None:
    if not rules.whole_models:
        raise SyncError(
            "the version is a whole model (modules_to_save); this engine serves low-rank adapters: whole models need "
            "train.parameters=full and policy.engine=transformers"
        )
    for name, _, _ in header.layout:
        if _NAME.match(name) or not _WHOLE.match(name):
            raise SyncError(f"tensor {name[:120]!r} is not a module's parameter (base_model.model.….weight|bias)")


def _check_config(header: BucketHeader, rules: AdapterRules) -> int:
    config = header.adapter_config
    rank, alpha = config.get("r"), config.get("lora_alpha")
    if not isinstance(rank, int) or isinstance(rank, bool) or not 1 <= rank <= rules.max_rank:
        raise SyncError(f"adapter rank {rank!r} is outside 1..{rules.max_rank}, which the engine was sized for")
    if isinstance(alpha, bool) or not isinstance(alpha, int | float) or not 0 < alpha <= MAX_ALPHA:
        raise SyncError(f"lora_alpha {alpha!r} is not a number above 0")
    for field in _UNSUPPORTED:
        if config.get(field):
            raise SyncError(f"adapter uses {field}, which the engines do not serve")
    if config.get("bias", "none") != "none":
        raise SyncError(f"adapter trains biases (bias={config['bias']!r}), which the engines do not serve")
    return rank


def _check_module(module: str, found: Mapping[str, tuple[int, ...]], rank: int, rules: AdapterRules) -> None:
    if module.rpartition(".")[2] not in rules.targets:
        raise SyncError(f"adapter changes {module}; the engine serves adapters on {', '.join(sorted(rules.targets))}")
    weight = rules.shapes.get(module)
    if weight is None or len(weight) != 2:
        raise SyncError(f"the model has no projection {module}, which the adapter changes")
    if set(found) != {"A", "B"}:
        raise SyncError(f"adapter has only lora_{next(iter(found))} of {module}")
    expected = {"A": (rank, weight[1]), "B": (weight[0], rank)}
    for side, shape in found.items():
        if tuple(shape) != expected[side]:
            raise SyncError(f"lora_{side} of {module} has the shape {tuple(shape)}, expected {expected[side]}")


def _shapes(path: Path) -> dict[str, tuple[int, ...]]:
    try:
        tensors = read_tensor_header(path).tensors
    except (OSError, HeaderError) as e:
        raise EngineError(f"cannot read the weights' header in {path}: {e}") from e
    return {t.name.removesuffix(".weight"): t.shape for t in tensors if t.name.endswith(".weight")}
