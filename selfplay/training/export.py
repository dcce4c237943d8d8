"""Rank 0's way out: adapters into the store, and as flat buckets to the engines.

In: `Export`, `JoinWeights`, `Send`. Out: an immutable version on disk (PEFT format, float32) and the same tensors, cast
to the engine's dtype, in one bucket that is gathered first and sent after. The disk is written beside the sending;
`send` returns when both are done, so that no version serves that a crash could lose.
"""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from selfplay.errors import TrainerError
from selfplay.store.adapters import AdapterStore
from selfplay.store.peft_format import WEIGHTS_NAME
from selfplay.sync import Bucket, DtypeName, Sender, make_sender, pack, save_adapter, unpack
from selfplay.training.model import PackedPolicy
from selfplay.types import PolicyVersion
from selfplay.wire.messages import Export, Exported, JoinWeights, Send, Sent


@dataclass(frozen=True)
class _Export:
    """The version that was exported last."""

    version: PolicyVersion
    bucket: Bucket
    stored: Future[str]
    """Its digest, once it is durable."""


class Exporter:
    """Publishes versions of the policy's adapters, one at a time."""

    def __init__(self, policy: PackedPolicy, dtype: DtypeName) -> None:
        self._policy, self._dtype = policy, dtype
        self._last: _Export | None = None
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="adapter-store")
        self._senders: dict[str, Sender] = {}

    def export(self, message: Export) -> Exported:
        """Gather the adapter as it is now for `send`, and begin to store it under ``message.version``."""
        version = message.version
        adapter = self._policy.adapters.get(version.agent)
        if adapter is None:
            raise TrainerError(
                f"{version} cannot be exported: agents here are {', '.join(sorted(self._policy.adapters))}"
            )
        live, config = adapter.tensors(), adapter.layout.adapter_config()
        bucket = pack(
            live, dtype=self._dtype, transport=message.transport, address=message.address, adapter_config=config
        )
        kept = _stored_form(live, bucket)
        stored = self._writer.submit(_store, AdapterStore(Path(message.folder)), message, kept, config)
        self._last = _Export(version, bucket, stored)
        return Exported(request=message.request, header=bucket.header)

    def join(self, message: JoinWeights) -> None:
        """Join the weights group as its rank 0; a group joined before is left first."""
        if message.rank != 0:
            raise TrainerError(f"the trainer is rank 0 of the weights group, not {message.rank}")
        old = self._senders.pop(message.transport, None)
        if old is not None:
            old.close()
        self._senders[message.transport] = make_sender(
            message.transport, address=message.address, world_size=message.world_size, timeout_s=message.timeout_s
        )

    def send(self, message: Send) -> Sent:
        """Send the bucket of the last `export` and wait until that version is stored.

        Raises `TrainerError` when the last export was of another version, and what the transport or the store raises.
        """
        last = self._last
        if last is None or last.version != message.version:
            was = last.version if last else "nothing was"
            raise TrainerError(f"{message.version} was not exported last ({was}): export it first")
        self._sender(last.bucket).send(last.bucket, message.timeout_s)
        return Sent(request=message.request, digest=last.stored.result())

    def close(self) -> None:
        """Finish writing and leave all groups; idempotent."""
        self._writer.shutdown(wait=True)
        for sender in self._senders.values():
            sender.close()
        self._senders.clear()

    def _sender(self, bucket: Bucket) -> Sender:
        transport, address = bucket.header.transport, bucket.header.address
        if transport not in self._senders:
            if transport in ("nccl", "gloo"):
                raise TrainerError(f"cannot send over {transport}: the weights group was not joined")
            self._senders[transport] = make_sender(transport, address=address, world_size=1, timeout_s=1.0)
        return self._senders[transport]


def _store(store: AdapterStore, message: Export, tensors: dict[str, Tensor], config: dict[str, Any]) -> str:
    version = message.version
    before = max((v for v in store.versions(version.agent) if v < version), default=None)
    return store.publish(
        version, lambda folder: save_adapter(folder, tensors, config), parent=message.parent or before
    )  # fmt: skip


def load_version(policy: PackedPolicy, store: AdapterStore, version: PolicyVersion) -> bool:
    """Start the agent from a stored version, bit for bit; False when the store does not have it."""
    if version not in store.versions(version.agent):
        return False
    store.verify(version)
    policy.adapters[version.agent].load(load_file(store.path(version) / WEIGHTS_NAME))
    return True


def _stored_form(live: dict[str, Tensor], bucket: Bucket) -> dict[str, Tensor]:
    """What goes into the store, float32 and nobody else's to change: the bucket itself where it is just that."""
    if bucket.header.dtype == "float32" and bucket.data.device.type == "cpu":
        return unpack(bucket.header, bucket.data)
    return {name: tensor.to("cpu", torch.float32, copy=True) for name, tensor in live.items()}
