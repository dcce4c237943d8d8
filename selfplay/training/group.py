"""The ranks of one trainer as a process group: the few collectives that training needs, the same on every rank.

One rank needs no group at all unless the base is sharded. Rendezvous is a file in the run's private runtime folder, and
gloo listens on loopback only. A collective whose peer died fails, at the latest after the timeout.
"""

from __future__ import annotations

import datetime
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import FileStore

from selfplay.errors import TrainerError

STORE_NAME = "trainer-group"


class RankGroup:
    """This process's place among ``world_size`` ranks."""

    def __init__(self, rank: int = 0, world_size: int = 1, device: torch.device | None = None) -> None:
        self.rank, self.world_size = rank, world_size
        self.device = device or torch.device("cpu")

    @classmethod
    def join(cls, *, rank: int, world_size: int, device: torch.device, runtime: Path, timeout_s: float) -> RankGroup:
        """Join the group; blocks until all ranks are there. Raises `TrainerError` after ``timeout_s``."""
        loopback = "lo" if sys.platform.startswith("linux") else "lo0"
        os.environ.setdefault("GLOO_SOCKET_IFNAME", loopback)
        timeout = datetime.timedelta(seconds=timeout_s)
        backend = "nccl" if device.type == "cuda" else "gloo"
        try:
            store = FileStore(str(runtime / STORE_NAME), world_size)
            dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=timeout)
        except (RuntimeError, dist.DistError) as e:
            raise TrainerError(
                f"rank {rank} of {world_size} did not meet the others within {timeout_s:.0f} s: {e}"
            ) from e
        return cls(rank, world_size, device)

    def sum(self, tensor: Tensor) -> None:
        """Add up ``tensor`` over all ranks, in place."""
        self._reduce(tensor, dist.ReduceOp.SUM)

    def max(self, tensor: Tensor) -> None:
        """Largest of all ranks, elementwise, in place."""
        self._reduce(tensor, dist.ReduceOp.MAX)

    def require_equal(self, what: str, values: Tensor) -> None:
        """Raise `TrainerError` on every rank unless integer ``values`` are the same on all of them. Also a barrier."""
        low, high = -values, values.clone()
        self.max(low)
        self.max(high)
        if not torch.equal(-low, high):
            raise TrainerError(f"the trainer ranks disagree about {what}: rank {self.rank} has {values.tolist()[:8]}")

    def barrier(self) -> None:
        """Wait for all ranks."""
        self.sum(torch.zeros(1, device=self.device))

    def close(self) -> None:
        """Leave the group; idempotent."""
        if dist.is_initialized():
            dist.destroy_process_group()

    def _reduce(self, tensor: Tensor, how: dist.ReduceOp.RedOpType) -> None:
        if self.world_size == 1:
            return
        try:
            dist.all_reduce(tensor, how)
        except (RuntimeError, dist.DistError) as e:
            raise TrainerError(f"rank {self.rank} lost another trainer rank in a collective: {e}") from e
