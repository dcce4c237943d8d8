"""One model folder in Hugging Face format, checked before anything heavy is imported.

In: a folder. Out: a `ResolvedModel`, or a `UserError` that says what is missing or not allowed. Weights are read from
safetensors only, and nothing in the folder is ever executed.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import msgspec

from selfplay.config.plain_file import read_plain
from selfplay.errors import UserError
from selfplay.models.cache import cached_digest
from selfplay.models.tensor_header import HeaderError, TensorInfo, read_tensor_header

Kind = Literal["local", "tiny", "smollm2", "hub"]

MAX_JSON_BYTES = 64 << 20
PICKLES = (".bin", ".pt", ".pth", ".pkl", ".ckpt")
_TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json")
_NOT_LORA = {"embed_tokens", "lm_head", "wte", "wpe", "embed_in", "embed_out"}


class ResolvedModel(msgspec.Struct, frozen=True, kw_only=True):
    """A base model as it lies on disk: what server and trainer load, and what the run records."""

    name: str
    """As the user wrote it."""
    path: Path
    digest: str
    """sha256 over the weight files."""
    kind: Kind
    model_type: str
    default_dtype: Literal["float32", "bfloat16"]
    """What ``dtype=auto`` means: float32 for models stored in float32, bfloat16 for all others."""
    max_position_embeddings: int
    vocab_size: int
    hidden_size: int
    num_layers: int
    linear_names: tuple[str, ...]
    """Last names of the projection matrices (``q_proj``, ...): what a LoRA adapter can be put on. Sorted."""
    num_bytes: int
    """Size of the weights."""
    num_parameters: int


def inspect_folder(name: str, path: Path, kind: Kind, cache: Path) -> ResolvedModel:
    """Check the folder and read what a run needs to know. Raises `UserError` naming file and remedy."""
    config = read_json(path / "config.json", name)
    weights = weight_files(path, name)
    _check_tokenizer(path, name)
    inner = config.get("text_config")
    text: dict[str, Any] = inner if isinstance(inner, dict) else config
    stored = str(text.get("dtype") or text.get("torch_dtype") or config.get("dtype") or config.get("torch_dtype") or "")
    model_type = config.get("model_type")
    if not isinstance(model_type, str):
        raise UserError(f"model {name!r}: {path / 'config.json'} names no model_type")
    tensors = _tensors(weights, name)
    return ResolvedModel(
        name=name,
        path=path,
        digest=cached_digest(weights, cache),
        kind=kind,
        model_type=model_type,
        default_dtype="float32" if stored == "float32" else "bfloat16",
        max_position_embeddings=_size(text, ("max_position_embeddings", "n_positions"), path, name),
        vocab_size=_size(text, ("vocab_size",), path, name),
        hidden_size=_size(text, ("hidden_size", "n_embd"), path, name),
        num_layers=_size(text, ("num_hidden_layers", "n_layer"), path, name),
        linear_names=_linear_names(tensors),
        num_bytes=sum(w.stat().st_size for w in weights),
        num_parameters=sum(math.prod(t.shape) for t in tensors),
    )


def weight_files(path: Path, name: str) -> tuple[Path, ...]:
    """The safetensors files of the model, in name order."""
    if not path.is_dir():
        raise UserError(f"model {name!r}: {path} is not a folder")
    index = path / "model.safetensors.index.json"
    if index.is_file():
        mapping = read_json(index, name).get("weight_map")
        named = list(mapping.values()) if isinstance(mapping, dict) else []
        if not named or not all(isinstance(f, str) and Path(f).name == f for f in named):
            raise UserError(f"model {name!r}: {index} has no usable weight_map")
        files = sorted(set(named))
    else:
        files = sorted(p.name for p in path.glob("*.safetensors"))
    missing = [f for f in files if not (path / f).is_file()]
    if missing:
        raise UserError(f"model {name!r}: {path} lacks {missing[0]}, which its index names")
    if files:
        return tuple(path / f for f in files)
    if any(p.suffix in PICKLES for p in path.iterdir()):
        raise UserError(
            f"model {name!r}: {path} holds pickled weights only, which can run code when loaded; "
            "convert them to safetensors"
        )
    raise UserError(f"model {name!r}: {path} holds no *.safetensors")


def read_json(path: Path, name: str) -> dict[str, Any]:
    """A JSON object from ``path``; raises `UserError` when it is missing, too large or not one."""
    try:
        value = json.loads(read_plain(path, MAX_JSON_BYTES))
    except FileNotFoundError:
        raise UserError(f"model {name!r}: {path} does not exist; a model folder is in Hugging Face format") from None
    except OSError as e:
        raise UserError(f"model {name!r}: cannot read {path}: {e.strerror}") from e
    except (ValueError, RecursionError) as e:
        raise UserError(f"model {name!r}: {path} is not valid JSON: {e}") from None
    if not isinstance(value, dict):
        raise UserError(f"model {name!r}: {path} does not hold a JSON object")
    return value


def _check_tokenizer(path: Path, name: str) -> None:
    if not any((path / t).is_file() for t in _TOKENIZERS):
        raise UserError(f"model {name!r}: {path} has no tokenizer (one of {', '.join(_TOKENIZERS)})")
    has_template = (path / "chat_template.jinja").is_file() or (path / "chat_template.json").is_file()
    if not has_template and not read_json(path / "tokenizer_config.json", name).get("chat_template"):
        raise UserError(f"model {name!r}: its tokenizer has no chat template; use a chat (instruct) model")


def _tensors(weights: tuple[Path, ...], name: str) -> list[TensorInfo]:
    found: list[TensorInfo] = []
    for path in weights:
        try:
            found += read_tensor_header(path).tensors
        except OSError as e:
            raise UserError(f"model {name!r}: cannot read {path}: {e.strerror}") from e
        except HeaderError as e:
            raise UserError(f"model {name!r}: {path} is not a whole safetensors file: {e}") from None
    return found


def _linear_names(tensors: Sequence[TensorInfo]) -> tuple[str, ...]:
    parts = [tensor.name.split(".") for tensor in tensors if len(tensor.shape) == 2]
    return tuple(sorted({p[-2] for p in parts if len(p) > 2 and p[-1] == "weight"} - _NOT_LORA))


def _size(config: dict[str, Any], keys: tuple[str, ...], path: Path, name: str) -> int:
    for key in keys:
        value = config.get(key)
        if isinstance(value, int) and value > 0:
            return value
    raise UserError(f"model {name!r}: {path / 'config.json'} has no {keys[0]}")
