"""Receiving new versions in the engine's process, beside generation.

    staging.join("gloo", address=..., rank=1, world_size=2, timeout_s=60)     # once; shm and file need no joining
    staging.begin(key, header, build)     # returns at once; a thread receives, verifies, unpacks and builds
    adapter = staging.take(key, timeout_s)    # when the sender is done: what ``build`` made, or SyncError
    staging.abort(key)                        # the sync failed: forget it

``build(tensors, header)`` runs in the thread, so the engine's own loop only ever registers a finished object. The tensors
are views of one host buffer that is nobody else's: ``build`` may keep and change them. Buckets over one transport are
received in the order of their `begin`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from torch import Tensor

from selfplay.errors import SyncError
from selfplay.sync.bucket import TransportName, check_header, unpack, verify
from selfplay.sync.transports import COLLECTIVE, Receiver, make_receiver
from selfplay.wire.messages import BucketHeader

T = TypeVar("T")
Build = Callable[[dict[str, Tensor], BucketHeader], T]

MAX_STAGED = 64
"""Versions that may be on their way at once; more means that nobody takes or aborts them."""


@dataclass(kw_only=True)
class _Job(Generic[T]):
    key: str
    header: BucketHeader
    build: Build[T]
    timeout_s: float
    after: _Job[T] | None
    receiver: Receiver | None = None
    cancelled: threading.Event = field(default_factory=threading.Event)
    ended: threading.Event = field(default_factory=threading.Event)
    result: T | None = None
    error: Exception | None = None


class Staging(Generic[T]):
    """The receivers of one engine process and what they are staging, by key (``agent@n``)."""

    def __init__(self, *, timeout_s: float = 60.0) -> None:
        self._timeout_s = timeout_s
        self._lock = threading.Lock()
        self._receivers: dict[str, Receiver] = {}
        self._jobs: dict[str, _Job[T]] = {}
        self._last: dict[str, _Job[T]] = {}

    def join(self, transport: TransportName, *, address: str, rank: int, world_size: int, timeout_s: float) -> None:
        """Join a weights group, replacing the one joined before. Blocks; raises `SyncError` after ``timeout_s``."""
        self.use(
            transport,
            make_receiver(transport, address=address, rank=rank, world_size=world_size, timeout_s=timeout_s),
        )

    def use(self, transport: TransportName, receiver: Receiver) -> None:
        """Receive ``transport`` through ``receiver`` from now on; the old one is closed."""
        with self._lock:
            old = self._receivers.get(transport)
            self._receivers[transport] = receiver
            self._last.pop(transport, None)  # nothing waits for what the old group still owes
        if old is not None:
            old.close()

    def begin(self, key: str, header: BucketHeader, build: Build[T], *, timeout_s: float | None = None) -> None:
        """Start receiving in the background. Raises `SyncError` at once for a bad header, a key in use or no group."""
        check_header(header)
        receiver = self._receiver(header.transport)
        with self._lock:
            if key in self._jobs:
                raise SyncError(f"{key} is being received already; abort it first")
            if len(self._jobs) >= MAX_STAGED:
                raise SyncError(f"{len(self._jobs)} versions are staged and not taken; at most {MAX_STAGED} may be")
            job = _Job(
                key=key, header=header, build=build, timeout_s=timeout_s or self._timeout_s,
                after=self._last.get(header.transport), receiver=receiver,
            )  # fmt: skip
            self._jobs[key] = self._last[header.transport] = job
        threading.Thread(target=self._run, args=(job,), name=f"receive {key}", daemon=True).start()

    def ready(self, key: str) -> bool:
        """Whether `take` would return or raise at once."""
        with self._lock:
            job = self._jobs.get(key)
        return job is None or job.ended.is_set()

    def take(self, key: str, timeout_s: float) -> T:
        """What ``build`` made of ``key``; raises `SyncError` with the cause, or when it is not there in time.

        The key is free again afterwards, whatever happened.
        """
        with self._lock:
            job = self._jobs.get(key)
        if job is None:
            raise SyncError(f"{key} was never begun, or was aborted or taken already")
        if not job.ended.wait(timeout_s):
            self.abort(key)
            raise SyncError(f"{key} did not arrive over {job.header.transport} within {timeout_s:g} s")
        with self._lock:
            self._jobs.pop(key, None)
        if job.error is not None:
            raise SyncError(f"{key}: {job.error}") from job.error
        return job.result  # type: ignore[return-value]  # set whenever there is no error

    def abort(self, key: str) -> None:
        """Forget ``key``; a receive that waits ends soon, and what it made is dropped. Harmless for an unknown key."""
        with self._lock:
            job = self._jobs.pop(key, None)
        if job is not None:
            job.cancelled.set()
            job.result = None

    def staged(self) -> tuple[str, ...]:
        """Keys begun and neither taken nor aborted."""
        with self._lock:
            return tuple(self._jobs)

    def close(self) -> None:
        """Abort everything and leave all groups."""
        for key in self.staged():
            self.abort(key)
        with self._lock:
            receivers, self._receivers = list(self._receivers.values()), {}
        for receiver in receivers:
            receiver.close()

    def _receiver(self, transport: TransportName) -> Receiver:
        with self._lock:
            receiver = self._receivers.get(transport)
            if receiver is None and transport not in COLLECTIVE:
                receiver = make_receiver(transport, address="", rank=1, world_size=2, timeout_s=self._timeout_s)
                self._receivers[transport] = receiver
        if receiver is None:
            raise SyncError(f"no {transport} group was joined; send JoinWeights first")
        if receiver.broken:
            raise SyncError(f"the {transport} group is broken: {receiver.broken}; join a new one")
        return receiver

    def _run(self, job: _Job[T]) -> None:
        try:
            if self._my_turn(job):
                job.result = _receive(job)
        except Exception as e:  # noqa: BLE001  the thread's boundary: whatever went wrong is raised by take()
            job.error = e
        finally:
            if job.cancelled.is_set():
                job.result = None
            with self._lock:
                job.receiver = None
                if self._last.get(job.header.transport) is job:
                    del self._last[job.header.transport]
            job.ended.set()

    def _my_turn(self, job: _Job[T]) -> bool:
        """Wait for the job before on the same transport; False when this one was aborted meanwhile."""
        if job.after is not None:
            job.after.ended.wait()
        job.after = None
        return not job.cancelled.is_set()


def _receive(job: _Job[T]) -> T:
    assert job.receiver is not None  # set by begin, cleared only when the job has ended
    data = job.receiver.receive(job.header, job.timeout_s, job.cancelled).cpu()  # at once, instead of tensor by tensor
    verify(job.header, data)
    return job.build(unpack(job.header, data), job.header)
