"""Rank 0's way out: adapters into the store, and as flat buckets to the engines.

In: `Export`, `JoinWeights`, `Send`. Out: an immutable version on disk (PEFT format, float32) and the same tensors, cast
to the engine's dtype, in one bucket that is gathered first and sent after.
"""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

from selfplay.errors import TrainerError
from selfplay.store.adapters import AdapterStore
from selfplay.store.peft_format import WEIGHTS_NAME
from selfplay.sync import Bucket, DtypeName, Sender, make_sender, pack, save_adapter
from selfplay.training.model import PackedPolicy
from selfplay.types import PolicyVersion
from selfplay.wire.messages import Export, Exported, JoinWeights, Send


class Exporter:
    """Publishes versions of the policy's adapters, one at a time."""

    def __init__(self, policy: PackedPolicy, dtype: DtypeName) -> None:
        self._policy, self._dtype = policy, dtype
        self._kept: tuple[PolicyVersion, Bucket] | None = None
        self._senders: dict[str, Sender] = {}

    def export(self, message: Export) -> Exported:
        """Store the adapter as it is now under ``message.version`` and keep its bucket for `send`."""
        version = message.version
        adapter = self._policy.adapters.get(version.agent)
        if adapter is None:
            raise TrainerError(
                f"{version} cannot be exported: agents here are {', '.join(sorted(self._policy.adapters))}"
            )
        tensors, config = _on_host(adapter.tensors()), self._policy.layout.adapter_config()
        store = AdapterStore(Path(message.folder))
        older = [v for v in store.versions(version.agent) if v < version]
        digest = store.publish(
            version, lambda folder: save_adapter(folder, tensors, config), parent=max(older, default=None)
        )
        bucket = pack(
            adapter.tensors(), dtype=self._dtype, transport=message.transport, address=message.address,
            adapter_config=config,
        )  # fmt: skip
        self._kept = (version, bucket)
        return Exported(request=message.request, digest=digest, header=bucket.header)

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

    def send(self, message: Send) -> None:
        """Send the bucket of the last `export`; raises `TrainerError` when it is of another version."""
        kept, bucket = self._kept if self._kept is not None else (None, None)
        if bucket is None or kept != message.version:
            raise TrainerError(f"{message.version} was not exported last ({kept or 'nothing was'}): export it first")
        self._sender(bucket).send(bucket, message.timeout_s)

    def close(self) -> None:
        """Leave all groups; idempotent."""
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


def load_version(policy: PackedPolicy, store: AdapterStore, version: PolicyVersion) -> bool:
    """Start the agent from a stored version, bit for bit; False when the store does not have it."""
    if version not in store.versions(version.agent):
        return False
    store.verify(version)
    policy.adapters[version.agent].load(load_file(store.path(version) / WEIGHTS_NAME))
    return True


def _on_host(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Private copies on the CPU; safetensors refuses tensors that share memory."""
    return {name: tensor.to("cpu", torch.float32, copy=True) for name, tensor in tensors.items()}
