"""What the conversations share: the protocol number, limits, and how an adapter's bucket is described."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from selfplay.types import Scalar

PROTOCOL = 3

Text = Annotated[str, Meta(max_length=20_000)]
Pin = Literal["turn", "episode"] | int
RequestId = Annotated[int, Meta(ge=0, le=2**63 - 1)]


class WireMessage(msgspec.Struct, frozen=True, kw_only=True, array_like=True, tag=True):
    pass


class BucketHeader(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """One flat adapter on its way: what arrives, how long it is, and how to know it arrived whole."""

    transport: Literal["nccl", "gloo", "shm", "file"]
    address: str
    """shm, file: a path. gloo, nccl: rendezvous of the group that is already joined."""
    offset: int
    num_bytes: int
    crc32: int
    dtype: Literal["float32", "bfloat16", "float16"]
    layout: tuple[tuple[str, tuple[int, ...], int], ...]
    """(PEFT tensor name, shape, element offset) of each tensor in the bucket."""
    adapter_config: dict[str, Scalar | list[str]]
    """The PEFT adapter_config fields an engine needs: r, lora_alpha, target_modules, use_rslora, ..."""


class JoinWeights(WireMessage, frozen=True, kw_only=True, tag="join"):
    """Controller → server or trainer: join the weights group; the trainer is rank 0, engine workers follow."""

    request: RequestId
    transport: Literal["nccl", "gloo"]
    address: str
    rank: int
    world_size: int
    timeout_s: float
