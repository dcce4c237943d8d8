"""One adapter as one flat buffer with a small header: what every transport moves.

In: PEFT tensors by name (trainer), or a received header and bytes (engine). Out: a `Bucket`, or tensors that are views
into the received bytes. Nothing is read before the header has been checked against the limits and against the number of
bytes that really arrived, so a wrong header raises `SyncError` and never reads past the buffer.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from isal import isal_zlib
from torch import Tensor

from selfplay.errors import SyncError
from selfplay.sync.host_memory import HOST_MEMORY
from selfplay.types import Scalar
from selfplay.wire.messages import BucketHeader

TransportName = Literal["nccl", "gloo", "shm", "file"]
DtypeName = Literal["float32", "bfloat16", "float16"]

DTYPES: dict[str, torch.dtype] = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
MAX_BUCKET_BYTES = 8 << 30
MAX_TENSORS = 100_000
MAX_DIMS = 4
MAX_NAME = 512


@dataclass(frozen=True, kw_only=True)
class Bucket:
    """A header and its data: uint8 [num_bytes], contiguous, on the device the tensors were on."""

    header: BucketHeader
    data: Tensor


def pack(
    tensors: Mapping[str, Tensor],
    *,
    dtype: DtypeName,
    transport: TransportName,
    address: str,
    adapter_config: Mapping[str, Scalar | list[str]],
) -> Bucket:
    """Flatten ``tensors`` in the order of their names, cast to ``dtype``, into one buffer.

    Raises `SyncError` when there is nothing to send or a value is not finite after the cast: an engine would sample
    garbage from it.
    """
    if not tensors:
        raise SyncError("an adapter without tensors cannot be sent")
    names = sorted(tensors)
    flat = _flatten([tensors[n].detach().flatten() for n in names], _torch_dtype(dtype))
    if not _is_finite(flat):
        raise SyncError(f"adapter tensor {_first_non_finite(tensors, names, dtype)!r} is not finite as {dtype}")
    layout, offset = [], 0
    for name in names:
        layout.append((name, tuple(tensors[name].shape), offset))
        offset += tensors[name].numel()
    data = flat.view(torch.uint8)
    header = BucketHeader(
        transport=transport, address=address, offset=0, num_bytes=data.numel(), crc32=checksum(data), dtype=dtype,
        layout=tuple(layout), adapter_config=dict(adapter_config),
    )  # fmt: skip
    check_header(header)
    return Bucket(header=header, data=data)


def unpack(header: BucketHeader, data: Tensor) -> dict[str, Tensor]:
    """The tensors of a received bucket by name: views into ``data`` (uint8 [num_bytes])."""
    check_header(header)
    _check_data(header, data)
    parts = data.view(DTYPES[header.dtype]).split([_numel(shape) for _, shape, _ in header.layout])
    return {name: part.view(shape) for part, (name, shape, _) in zip(parts, header.layout, strict=True)}


def verify(header: BucketHeader, data: Tensor) -> None:
    """Raise `SyncError` with both checksums unless ``data`` is what the header describes."""
    _check_data(header, data)
    found = checksum(data)
    if found != header.crc32:
        raise SyncError(
            f"adapter arrived damaged over {header.transport}: crc32 {found:08x}, sent as {header.crc32:08x} "
            f"({header.num_bytes} bytes)"
        )


def checksum(data: Tensor) -> int:
    """crc32 of a uint8 tensor, that of `zlib` in a quarter of its time; a device tensor is copied to the host first."""
    return isal_zlib.crc32(host_view(data))


def host_view(data: Tensor) -> memoryview:
    """The bytes of a uint8 tensor without a copy; a device tensor is copied to the host first."""
    return memoryview(data.cpu().numpy())  # type: ignore[arg-type]  # numpy's stubs hide the buffer protocol


def check_header(header: BucketHeader) -> None:
    """Raise `SyncError` unless the header is within the limits and its tensors tile the buffer without gap or overlap."""
    if header.dtype not in DTYPES:
        raise SyncError(f"bucket dtype {header.dtype!r} is not one of {', '.join(DTYPES)}")
    if not 0 < header.num_bytes <= MAX_BUCKET_BYTES:
        raise SyncError(f"bucket of {header.num_bytes} bytes is outside 1..{MAX_BUCKET_BYTES}")
    if not 0 <= header.offset <= MAX_BUCKET_BYTES or not 0 <= header.crc32 < 2**32:
        raise SyncError(f"bucket offset {header.offset} or crc32 {header.crc32} is out of range")
    if not 0 < len(header.layout) <= MAX_TENSORS:
        raise SyncError(f"bucket of {len(header.layout)} tensors is outside 1..{MAX_TENSORS}")
    if len({name for name, _, _ in header.layout}) != len(header.layout):
        raise SyncError("a tensor name occurs twice in the bucket header")
    edge = 0
    for name, shape, start in header.layout:
        _check_tensor(name, shape)
        if start != edge:
            raise SyncError(f"tensor {name!r} starts at element {start} of the bucket, expected {edge}")
        edge += _numel(shape)
    if edge * DTYPES[header.dtype].itemsize != header.num_bytes:
        raise SyncError(f"bucket header lists {edge} {header.dtype} elements but {header.num_bytes} bytes")


def _check_tensor(name: str, shape: tuple[int, ...]) -> None:
    if not name or len(name) > MAX_NAME or not name.isprintable():
        raise SyncError(f"tensor name {name[:80]!r} in the bucket header is not allowed")
    if len(shape) > MAX_DIMS or not all(0 < d <= MAX_BUCKET_BYTES for d in shape):
        raise SyncError(f"tensor {name!r} has the shape {shape}; at most {MAX_DIMS} positive sizes are allowed")


def _check_data(header: BucketHeader, data: Tensor) -> None:
    if data.dtype != torch.uint8 or data.dim() != 1 or not data.is_contiguous():
        raise SyncError(f"bucket data must be contiguous uint8 [N], not {data.dtype} {tuple(data.shape)}")
    if data.numel() != header.num_bytes:
        raise SyncError(f"bucket has {data.numel()} bytes but its header says {header.num_bytes}")
    if data.data_ptr() % DTYPES[header.dtype].itemsize:
        raise SyncError("bucket data is not aligned to its element size")


def _flatten(parts: list[Tensor], dtype: torch.dtype) -> Tensor:
    """One after the other, cast on the way; on the host in memory that the process has used before."""
    if any(part.device.type != "cpu" for part in parts):
        return torch.cat(parts).to(dtype)
    flat = HOST_MEMORY.take(sum(part.numel() for part in parts) * dtype.itemsize).view(dtype)
    return torch.cat(parts, out=flat)


def _torch_dtype(name: str) -> torch.dtype:
    if name not in DTYPES:
        raise SyncError(f"dtype {name!r} is not one of {', '.join(DTYPES)}")
    return DTYPES[name]


def _is_finite(tensor: Tensor) -> bool:
    """One pass over the values, several times faster than `torch.isfinite`: both bounds are NaN if any value is."""
    low, high = torch.aminmax(tensor)
    return math.isfinite(float(low)) and math.isfinite(float(high))


def _first_non_finite(tensors: Mapping[str, Tensor], names: list[str], dtype: str) -> str:
    return next(n for n in names if not _is_finite(tensors[n].detach().to(DTYPES[dtype])))


def _numel(shape: tuple[int, ...]) -> int:
    return math.prod(shape)
