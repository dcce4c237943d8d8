"""gloo and nccl: a process group of our own for weights, apart from the trainer's and the engine's groups.

Rank 0 (trainer) broadcasts one flat uint8 tensor to the engine workers. Before each broadcast it announces number, size
and checksum through the group's store, and a receiver posts its buffer only for the announcement it was told to expect:
gloo ends the whole process when sizes disagree, and a broadcast that is already posted cannot be taken back, so both
are ruled out beforehand. A receiver that is cancelled before the announcement leaves the group intact.

A group whose broadcast failed is not used again (a late peer would pair with the wrong broadcast): both sides join anew.

The nccl route needs two GPUs' worth of processes; it follows the same steps and has not been exercised by the tests of
a machine without GPUs.
"""

from __future__ import annotations

import datetime
import os
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C import _distributed_c10d as c10d

from selfplay.errors import ConfigError, SyncError
from selfplay.sync.bucket import Bucket, TransportName, check_header
from selfplay.sync.host_memory import HOST_MEMORY
from selfplay.wire.messages import BucketHeader

LOOPBACK = {"127.0.0.1", "localhost", "::1"}
_POLL_S = 0.001


@dataclass(kw_only=True)
class Group:
    """A joined group: the store for announcements, the process group for bytes."""

    transport: TransportName
    address: str
    rank: int
    store: Any
    process_group: Any
    device: torch.device
    num_sends: int = 0
    broken: str = ""

    def require_healthy(self) -> None:
        if self.broken:
            raise SyncError(f"the {self.transport} group at {self.address} is broken: {self.broken}; join a new one")

    def fail(self, reason: str) -> SyncError:
        """Mark the group as broken and return the error to raise."""
        self.broken = self.broken or reason
        return SyncError(f"weight sync over {self.transport} failed: {reason}")

    def close(self) -> None:
        if self.transport == "nccl" and self.process_group is not None:
            self.process_group.abort()
        self.process_group = self.store = None
        self.broken = self.broken or "it was closed"


def join(transport: TransportName, *, address: str, rank: int, world_size: int, timeout_s: float) -> Group:
    """Join the group at ``address``: ``file:///path`` (a path not used before) or ``tcp://127.0.0.1:port`` (rank 0 listens).

    Blocks until everybody is there. Raises `SyncError` after ``timeout_s``, `ConfigError` for an address that may not be used.
    """
    if world_size < 2 or not 0 <= rank < world_size:
        raise ConfigError(
            f"rank {rank} of a group of {world_size}: a weights group has the trainer and at least one engine"
        )
    store = _store(address, rank, world_size, timeout_s)
    try:
        group = (
            _nccl(store, rank, world_size, timeout_s)
            if transport == "nccl"
            else _gloo(store, rank, world_size, timeout_s)
        )
    except RuntimeError as e:
        raise SyncError(
            f"rank {rank} could not join the {transport} group of {world_size} at {address} within {timeout_s:g} s: {_short(e)}"
        ) from e
    device = torch.device("cuda", torch.cuda.current_device()) if transport == "nccl" else torch.device("cpu")
    return Group(transport=transport, address=address, rank=rank, store=store, process_group=group, device=device)


class CollectiveSender:
    """Rank 0 of a joined group."""

    def __init__(self, group: Group) -> None:
        self._group = group

    @property
    def broken(self) -> str:
        return self._group.broken

    def send(self, bucket: Bucket, timeout_s: float) -> None:
        """Announce, then broadcast. Returns when the bytes have left; the engines confirm by committing."""
        group = self._group
        group.require_healthy()
        group.num_sends += 1
        try:
            group.store.set(f"send/{group.num_sends}", _announcement(bucket.header))
        except RuntimeError as e:
            raise group.fail(f"announcement of send {group.num_sends} was not written: {_short(e)}") from e
        _broadcast(group, bucket.data.to(group.device), timeout_s)

    def close(self) -> None:
        self._group.close()


class CollectiveReceiver:
    """Any other rank of a joined group."""

    def __init__(self, group: Group) -> None:
        self._group = group

    @property
    def broken(self) -> str:
        return self._group.broken

    def receive(self, header: BucketHeader, timeout_s: float, cancelled: threading.Event | None = None) -> Tensor:
        """Wait for the announcement of ``header``, then take part in its broadcast; on the group's device."""
        group, deadline = self._group, time.monotonic() + timeout_s
        group.require_healthy()
        check_header(header)
        data = _buffer(header.num_bytes, group.device)
        found = self._announced(group.num_sends + 1, timeout_s, cancelled)
        group.num_sends += 1
        if found != _announcement(header):
            raise group.fail(
                f"send {group.num_sends} is {found} but {_announcement(header)} was expected (bytes:crc32)"
            )
        _broadcast(group, data, max(_POLL_S, deadline - time.monotonic()))
        return data

    def close(self) -> None:
        self._group.close()

    def _announced(self, number: int, timeout_s: float, cancelled: threading.Event | None) -> str:
        key, deadline = f"send/{number}", time.monotonic() + timeout_s
        while cancelled is None or not cancelled.is_set():
            try:
                if self._group.store.check([key]):
                    return str(self._group.store.get(key).decode())
            except RuntimeError as e:
                raise self._group.fail(f"the sender's store is gone: {_short(e)}") from e
            if time.monotonic() > deadline:
                raise SyncError(f"the sender announced nothing over {self._group.transport} within {timeout_s:g} s")
            time.sleep(_POLL_S)
        raise SyncError("receive was cancelled")


def _buffer(num_bytes: int, device: torch.device) -> Tensor:
    if device.type == "cpu":
        return HOST_MEMORY.take(num_bytes)
    return torch.empty(num_bytes, dtype=torch.uint8, device=device)


def _announcement(header: BucketHeader) -> str:
    return f"{header.num_bytes}:{header.crc32:08x}"


def _broadcast(group: Group, data: Tensor, timeout_s: float) -> None:
    """One flat broadcast from rank 0, bounded by ``timeout_s``; a failure breaks the group."""
    limit = datetime.timedelta(seconds=max(timeout_s, 0.001))
    options = dist.BroadcastOptions()
    options.rootRank, options.rootTensor, options.timeout = 0, 0, limit
    try:
        work = group.process_group.broadcast([data], options)
        if data.is_cuda:
            _wait_for_device(group, work, timeout_s)
        else:
            work.wait(limit)
    except RuntimeError as e:
        peer = "a receiver" if group.rank == 0 else "the sender"
        raise group.fail(f"{peer} did not take part within {timeout_s:.3g} s or died ({_short(e)})") from e


def _wait_for_device(group: Group, work: Any, timeout_s: float) -> None:
    """NCCL's own wait only orders streams; poll its completion, and abort the communicator at the deadline."""
    deadline = time.monotonic() + timeout_s
    while not work.is_completed():
        if time.monotonic() > deadline:
            group.process_group.abort()
            raise RuntimeError("timed out")
        time.sleep(_POLL_S / 4)
    work.wait()
    torch.cuda.current_stream(group.device).synchronize()


def _store(address: str, rank: int, world_size: int, timeout_s: float) -> Any:
    limit = datetime.timedelta(seconds=timeout_s)
    if address.startswith("file:///"):
        path = Path(address.removeprefix("file://"))
        if not path.parent.is_dir():
            raise ConfigError(f"weights rendezvous {address}: the folder {path.parent} does not exist")
        store = c10d.FileStore(str(path), world_size)
        store.set_timeout(limit)
        return store
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    if not address.startswith("tcp://") or not port.isdigit() or not 0 < int(port) < 65536:
        raise ConfigError(f"weights rendezvous {address!r} is neither file:///path nor tcp://127.0.0.1:port")
    if host.strip("[]") not in LOOPBACK:
        raise ConfigError(
            f"weights rendezvous {address}: a weights group is not encrypted, so only loopback is allowed"
        )
    try:
        return c10d.TCPStore(host.strip("[]"), int(port), world_size, rank == 0, limit, wait_for_workers=False)
    except RuntimeError as e:
        raise SyncError(f"rank {rank} could not reach the weights rendezvous {address}: {_short(e)}") from e


def _gloo(store: Any, rank: int, world_size: int, timeout_s: float) -> Any:
    backend: Any = dist.ProcessGroupGloo
    options = backend._Options()
    options._devices = [backend.create_device(hostname="127.0.0.1")]
    options._timeout = datetime.timedelta(seconds=timeout_s)
    options._threads = 1
    return backend(c10d.PrefixStore("weights", store), rank, world_size, options)


def _nccl(store: Any, rank: int, world_size: int, timeout_s: float) -> Any:
    """One communicator over the current device of each process. Bootstraps over loopback unless told otherwise."""
    backend = getattr(dist, "ProcessGroupNCCL", None)
    if backend is None or not torch.cuda.is_available():
        raise ConfigError(
            "transport 'nccl' needs GPUs and a torch build with NCCL; use sync.transport=gloo, shm or file"
        )
    os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")
    options = backend.Options()
    options._timeout = datetime.timedelta(seconds=timeout_s)
    return backend(c10d.PrefixStore("weights", store), rank, world_size, options)


def _short(error: Exception) -> str:
    """A library error on one line, without its advertisement."""
    text = " ".join(str(error).split())
    return text.partition(" This is typically")[0][:300]
