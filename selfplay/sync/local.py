"""shm and file: the bucket is a file that sender and receivers both see.

``shm``: in the run's private folder in shared memory, mode 0600. ``file``: fsync'ed on a disk, or a PEFT adapter folder
of the AdapterStore (start and resume), in which case nobody has to send: it already lies there.

The address is a folder, or a path to write beside; it may be the same for every version: the file's own name carries size
and checksum, so a receiver that waits for a new version is never given the one before. The file appears by rename, so it
is whole when it is seen. It is read into private memory instead of being mapped: a mapping would die by SIGBUS if the file
were truncated, and would let the sender change a live adapter.
"""

from __future__ import annotations

import os
import stat
import threading
import time
from pathlib import Path

from torch import Tensor

from selfplay.errors import StoreError, SyncError
from selfplay.store.atomic import write_bytes
from selfplay.store.peft_format import WEIGHTS_NAME
from selfplay.sync.bucket import Bucket, check_header, host_view
from selfplay.sync.host_memory import HOST_MEMORY
from selfplay.wire.messages import BucketHeader

_POLL_S = 0.001


class FolderSender:
    """Writes each bucket in or beside its header's address; the file before it is deleted, and the last one at `close`."""

    def __init__(self, *, durable: bool) -> None:
        self._durable = durable
        self._left: Path | None = None
        self.broken = ""

    def send(self, bucket: Bucket, timeout_s: float) -> None:  # noqa: ARG002 (a local write has no peer to wait for)
        """Write and publish by rename; raises `SyncError` when the disk does not take it."""
        path = _file_of(bucket.header)
        if self._left != path:
            self._forget()
        try:
            write_bytes(path, host_view(bucket.data), durable=self._durable, mode=0o600)
        except StoreError as e:
            raise SyncError(f"weight sync over {bucket.header.transport} failed: {e}") from e
        self._left = path

    def close(self) -> None:
        self._forget()

    def _forget(self) -> None:
        if self._left is not None:
            self._left.unlink(missing_ok=True)
        self._left = None


class FolderReceiver:
    """Reads the file at the header's address, waiting for it to appear."""

    def __init__(self) -> None:
        self.broken = ""

    def receive(self, header: BucketHeader, timeout_s: float, cancelled: threading.Event | None = None) -> Tensor:
        """A private copy of ``num_bytes`` bytes from ``offset``; raises `SyncError` when file and header disagree."""
        check_header(header)
        stop = cancelled or threading.Event()
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                return _read(_file_of(header), header)
            except FileNotFoundError:
                if time.monotonic() > deadline:
                    raise SyncError(
                        f"nothing appeared at {header.address} within {timeout_s:g} s ({header.transport})"
                    ) from None
            except OSError as e:
                raise SyncError(f"cannot read the adapter at {header.address}: {e.strerror}") from e
            if stop.wait(_POLL_S):
                raise SyncError("receive was cancelled")

    def close(self) -> None:
        """Nothing is held between two receives."""


def _file_of(header: BucketHeader) -> Path:
    """A published folder's weights start behind their own header, so its buckets have an offset; sent ones have none."""
    path = Path(header.address)
    if header.offset:
        return path / WEIGHTS_NAME
    name = f"{header.num_bytes}-{header.crc32:08x}.bucket"
    return path / name if path.is_dir() else path.with_name(f"{path.name}.{name}")


def _read(path: Path, header: BucketHeader) -> Tensor:
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    with os.fdopen(fd, "rb", buffering=0) as f:
        info = os.fstat(fd)
        if not stat.S_ISREG(info.st_mode) or info.st_size != header.offset + header.num_bytes:
            raise SyncError(
                f"{path} has {info.st_size} bytes; the header says {header.num_bytes} from byte {header.offset} to the end"
            )
        f.seek(header.offset)
        data = HOST_MEMORY.take(header.num_bytes)
        view, done = host_view(data), 0
        while done < header.num_bytes:
            count = f.readinto(view[done:])
            if not count:
                raise SyncError(f"{path} ended after {done} of {header.num_bytes} bytes")
            done += count
    return data
