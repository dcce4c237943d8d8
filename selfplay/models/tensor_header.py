"""The header of a safetensors file, read and checked without loading a tensor.

In: a file that may come from somebody else. Out: where each tensor lies, or `HeaderError`. Every size is bounded before
it is used, and the tensors must tile the file exactly, so a file that was cut off is seen here.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import msgspec
from msgspec import Meta

MAX_HEADER_BYTES = 64 << 20
_Size = Annotated[int, Meta(ge=0, lt=2**48)]


class HeaderError(ValueError):
    """The file is not a whole safetensors file; the message does not name it."""


class TensorInfo(NamedTuple):
    """One tensor: its bytes are ``start``..``end`` of the data section."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int


class TensorHeader(NamedTuple):
    """``offset``: where the data section begins in the file. ``tensors`` in the order of their bytes."""

    offset: int
    tensors: tuple[TensorInfo, ...]


class _Entry(msgspec.Struct):
    dtype: str
    shape: list[_Size]
    data_offsets: tuple[_Size, _Size]


def read_tensor_header(path: Path, max_bytes: int = MAX_HEADER_BYTES) -> TensorHeader:
    """Read the header of ``path``. Raises `HeaderError`, or OSError when the file cannot be read."""
    with path.open("rb") as f:
        size = path.stat().st_size
        length = int.from_bytes(f.read(8), "little")
        if size < 8 or not 2 <= length <= min(max_bytes, size - 8):
            raise HeaderError(f"header of {length} bytes in a file of {size}; at most {max_bytes} are read")
        entries = _decode(f.read(length))
    tensors = sorted((_info(name, entry) for name, entry in entries.items()), key=lambda t: (t.start, t.end))
    edge = 0
    for t in tensors:
        if t.start != edge or t.end < t.start:
            raise HeaderError(
                f"tensor {t.name[:120]!r} lies at bytes {t.start}..{t.end}, expected from {edge}: gap or overlap"
            )
        edge = t.end
    if not tensors:
        raise HeaderError("it holds no tensors")
    if edge != size - 8 - length:
        raise HeaderError(f"cut off or damaged: tensors end at byte {edge} of {size - 8 - length}")
    return TensorHeader(8 + length, tuple(tensors))


def unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """For ``json.loads(object_pairs_hook=...)``: an object whose keys occur once."""
    if len(dict(pairs)) != len(pairs):
        raise ValueError("a key occurs twice")
    return dict(pairs)


def _decode(text: bytes) -> dict[str, Any]:
    try:
        header = json.loads(text, object_pairs_hook=unique_keys)
    except (ValueError, RecursionError) as e:
        raise HeaderError(f"its header is not valid JSON: {e}") from None
    if not isinstance(header, dict):
        raise HeaderError("its header is not a JSON object")
    return {name: entry for name, entry in header.items() if name != "__metadata__"}


def _info(name: str, entry: Any) -> TensorInfo:
    try:
        checked = msgspec.convert(entry, _Entry)
    except msgspec.ValidationError as e:
        raise HeaderError(f"the header entry of {name[:120]!r} is malformed: {e}") from None
    return TensorInfo(name, checked.dtype, tuple(checked.shape), *checked.data_offsets)
