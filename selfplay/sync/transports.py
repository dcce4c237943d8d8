"""The seam between a bucket and the wire it travels on: `Sender` on trainer rank 0, `Receiver` in each engine process.

    trainer rank 0   sender.send(bucket, timeout_s)
    engine worker    data = receiver.receive(header, timeout_s)      # uint8 [num_bytes], private memory

`gloo` and `nccl` are process groups of their own (`collective`), `shm` and `file` are files (`local`). Every call is
bounded by its timeout and fails with `SyncError`. A sender or receiver whose group broke says so in ``broken`` and keeps
refusing: join again under a fresh address.
"""

from __future__ import annotations

from threading import Event
from typing import Protocol

from torch import Tensor

from selfplay.errors import ConfigError
from selfplay.sync.bucket import Bucket, TransportName
from selfplay.wire.messages import BucketHeader

COLLECTIVE: tuple[TransportName, ...] = ("nccl", "gloo")
"""Transports whose two sides must join a group before the first send."""


class Sender(Protocol):
    """Sends whole buckets, one at a time."""

    @property
    def broken(self) -> str:
        """Why this sender cannot be used any more; empty while it can."""

    def send(self, bucket: Bucket, timeout_s: float) -> None:
        """Hand the bucket to every receiver; raises `SyncError` at the latest after ``timeout_s``."""

    def close(self) -> None:
        """Leave the group and delete what was left for receivers; idempotent."""


class Receiver(Protocol):
    """Receives whole buckets, one at a time, from any thread."""

    @property
    def broken(self) -> str:
        """Why this receiver cannot be used any more; empty while it can."""

    def receive(self, header: BucketHeader, timeout_s: float, cancelled: Event | None = None) -> Tensor:
        """Wait for the bucket of ``header``: uint8 [num_bytes] in memory nobody else writes. Not yet verified.

        Setting ``cancelled`` from another thread ends the wait with `SyncError`; a transfer that has begun is ended by its
        timeout only.
        """

    def close(self) -> None:
        """Leave the group; idempotent."""


def make_sender(transport: TransportName, *, address: str, world_size: int, timeout_s: float) -> Sender:
    """The sending side (rank 0). ``address``: rendezvous for gloo and nccl (`collective.join`), ignored by shm and file.

    Blocks until all ``world_size`` ranks have joined; raises `SyncError` after ``timeout_s``.
    """
    if transport in COLLECTIVE:
        from selfplay.sync.collective import CollectiveSender, join

        return CollectiveSender(join(transport, address=address, rank=0, world_size=world_size, timeout_s=timeout_s))
    from selfplay.sync.local import FolderSender

    return FolderSender(durable=_is_file(transport))


def make_receiver(transport: TransportName, *, address: str, rank: int, world_size: int, timeout_s: float) -> Receiver:
    """The receiving side; ``rank`` is 1..world_size−1 for gloo and nccl, ignored by shm and file."""
    if transport in COLLECTIVE:
        from selfplay.sync.collective import CollectiveReceiver, join

        if rank < 1:
            raise ConfigError(f"a receiver's rank is 1 or more, not {rank}: rank 0 is the trainer")
        return CollectiveReceiver(
            join(transport, address=address, rank=rank, world_size=world_size, timeout_s=timeout_s)
        )
    from selfplay.sync.local import FolderReceiver

    _is_file(transport)
    return FolderReceiver()


def _is_file(transport: str) -> bool:
    if transport not in ("shm", "file"):
        raise ConfigError(f"unknown transport {transport!r}; known: nccl, gloo, shm, file")
    return transport == "file"
