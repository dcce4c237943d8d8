"""FSDP2 over the frozen base: whether to shard it, and how.

Adapters are never sharded: they are small, whole on every rank, and their gradients travel in one flat all-reduce per
agent. So a sharded base costs all-gathers only, and no reduce-scatter.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from selfplay.training.model import PackedPolicy

Setting = Literal["auto", "base", "none"]


def shards_base(setting: Setting, *, device: torch.device, world_size: int) -> bool:
    """Whether the base is sharded. ``auto``: on more than one GPU.

    On CPUs gathering layer by layer over gloo cost several times what the computing did, and saved no memory, as every
    rank loads the whole base first; on GPUs memory is the limit and gathering is quick.
    """
    return setting == "base" or (setting == "auto" and device.type == "cuda" and world_size > 1)


def shard_base(policy: PackedPolicy, *, device: torch.device, world_size: int) -> None:
    """Shard every layer and the rest of the base over all ranks; adapters stay whole, in float32.

    No mixed-precision policy: it would cast the adapters, too.
    """
    mesh = init_device_mesh(device.type, (world_size,))
    adapters = {adapter.flat for adapter in policy.adapters.values()}
    for layer in policy.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(policy, mesh=mesh, ignored_params=adapters)
