"""Background receiving, with receivers that are slow, broken or absent."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
import torch
from tests.patience import PATIENCE_S
from torch import Tensor

from selfplay.errors import SyncError
from selfplay.sync import Bucket, Staging, make_sender, pack
from selfplay.sync import staging as staging_module
from selfplay.wire.messages import BucketHeader


def bucket_of(value: float, address: str = "") -> Bucket:
    return pack(
        {"w": torch.full((4,), value)}, dtype="float32", transport="gloo", address=address, adapter_config={"r": 1}
    )


class ScriptedReceiver:
    """Gives out buckets one by one, each only when its gate opens; can corrupt or drop them."""

    def __init__(self) -> None:
        self.broken = ""
        self.gates: list[threading.Event] = []
        self.buckets: list[Bucket] = []
        self.order: list[int] = []
        self.flip = False
        self.error: Exception | None = None
        self.closed = False

    def expect(self, bucket: Bucket) -> threading.Event:
        self.buckets.append(bucket)
        self.gates.append(threading.Event())
        return self.gates[-1]

    def receive(self, header: BucketHeader, timeout_s: float, cancelled: threading.Event | None = None) -> Tensor:
        index = next(i for i, b in enumerate(self.buckets) if b.header == header)
        for _ in range(int(timeout_s * 1000)):
            if cancelled is not None and cancelled.is_set():
                raise SyncError("receive was cancelled")
            if self.gates[index].wait(0.001):
                break
        else:
            raise SyncError("nothing came")
        self.order.append(index)
        if self.error is not None:
            raise self.error
        data = self.buckets[index].data.clone()
        if self.flip:
            data[3] ^= 64
        return data

    def close(self) -> None:
        self.closed = True


def mean(tensors: dict[str, Tensor], header: BucketHeader) -> float:
    assert header.adapter_config == {"r": 1}
    return float(tensors["w"].mean())


@pytest.fixture
def receiver() -> ScriptedReceiver:
    return ScriptedReceiver()


@pytest.fixture
def staging(receiver: ScriptedReceiver) -> Iterator[Staging[float]]:
    staging: Staging[float] = Staging(timeout_s=20)
    staging.use("gloo", receiver)
    yield staging
    staging.close()
    for thread in threading.enumerate():
        if thread.name.startswith("receive "):
            thread.join(PATIENCE_S)
            assert not thread.is_alive(), f"{thread.name} was left behind"


def test_what_was_built_is_taken_once(staging: Staging[float], receiver: ScriptedReceiver) -> None:
    gate = receiver.expect(bucket_of(3))
    staging.begin("pro@1", receiver.buckets[0].header, mean)
    assert staging.staged() == ("pro@1",)
    assert not staging.ready("pro@1")
    gate.set()
    assert staging.take("pro@1", 20) == 3
    assert staging.ready("pro@1")
    with pytest.raises(SyncError, match="pro@1 was never begun"):
        staging.take("pro@1", 20)


def test_a_corrupted_bucket_never_reaches_build(staging: Staging[float], receiver: ScriptedReceiver) -> None:
    receiver.flip = True
    receiver.expect(bucket_of(3)).set()
    staging.begin("pro@1", receiver.buckets[0].header, lambda *_: pytest.fail("built from damaged bytes"))
    with pytest.raises(SyncError, match="pro@1: adapter arrived damaged"):
        staging.take("pro@1", 20)


def test_take_gives_up_and_the_key_is_free_again(staging: Staging[float], receiver: ScriptedReceiver) -> None:
    receiver.expect(bucket_of(3))
    staging.begin("pro@1", receiver.buckets[0].header, mean)
    with pytest.raises(SyncError, match=r"pro@1 did not arrive over gloo within 0\.05 s"):
        staging.take("pro@1", 0.05)
    receiver.expect(bucket_of(4)).set()
    staging.begin("pro@1", receiver.buckets[1].header, mean)
    assert staging.take("pro@1", 20) == 4


@pytest.mark.parametrize("error", [SyncError("sender died"), OSError(5, "I/O error"), KeyError("w")])
def test_whatever_goes_wrong_in_the_thread_is_raised_by_take(
    staging: Staging[float], receiver: ScriptedReceiver, error: Exception
) -> None:
    receiver.error = error
    receiver.expect(bucket_of(3)).set()
    staging.begin("pro@1", receiver.buckets[0].header, mean)
    with pytest.raises(SyncError, match=r"pro@1: ") as caught:
        staging.take("pro@1", 20)
    assert caught.value.__cause__ is error


def test_an_error_of_build_is_raised_by_take(staging: Staging[float], receiver: ScriptedReceiver) -> None:
    receiver.expect(bucket_of(3)).set()
    staging.begin("pro@1", receiver.buckets[0].header, lambda tensors, _: float(tensors["missing"].mean()))
    with pytest.raises(SyncError, match="pro@1: 'missing'"):
        staging.take("pro@1", 20)


def test_two_keys_are_received_in_the_order_of_begin(staging: Staging[float], receiver: ScriptedReceiver) -> None:
    first, second = receiver.expect(bucket_of(1)), receiver.expect(bucket_of(2))
    staging.begin("pro@1", receiver.buckets[0].header, mean)
    staging.begin("con@1", receiver.buckets[1].header, mean)
    second.set()
    first.set()
    assert staging.take("con@1", 20) == 2
    assert staging.take("pro@1", 20) == 1
    assert receiver.order == [0, 1]


def test_abort_frees_the_transport_for_the_next(staging: Staging[float], receiver: ScriptedReceiver) -> None:
    receiver.expect(bucket_of(1))
    receiver.expect(bucket_of(2)).set()
    staging.begin("pro@1", receiver.buckets[0].header, mean)
    staging.begin("con@1", receiver.buckets[1].header, mean)
    staging.abort("pro@1")
    staging.abort("pro@1")
    assert staging.take("con@1", 20) == 2
    assert receiver.order == [1]


def test_aborted_before_its_turn_is_never_received(staging: Staging[float], receiver: ScriptedReceiver) -> None:
    first = receiver.expect(bucket_of(1))
    receiver.expect(bucket_of(2)).set()
    staging.begin("pro@1", receiver.buckets[0].header, mean)
    staging.begin("con@1", receiver.buckets[1].header, mean)
    staging.abort("con@1")
    first.set()
    assert staging.take("pro@1", 20) == 1
    with pytest.raises(SyncError, match="never begun"):
        staging.take("con@1", 20)
    assert receiver.order == [0]


def test_refused_at_once(staging: Staging[float], receiver: ScriptedReceiver, monkeypatch: pytest.MonkeyPatch) -> None:
    header = bucket_of(1).header
    receiver.expect(bucket_of(1))
    with pytest.raises(SyncError, match="outside"):
        staging.begin("pro@1", msgspec.structs.replace(header, num_bytes=1 << 50), mean)
    with pytest.raises(SyncError, match="no nccl group was joined"):
        staging.begin("pro@1", msgspec.structs.replace(header, transport="nccl"), mean)
    staging.begin("pro@1", header, mean)
    with pytest.raises(SyncError, match="being received already"):
        staging.begin("pro@1", header, mean)
    monkeypatch.setattr(staging_module, "MAX_STAGED", 1)
    with pytest.raises(SyncError, match="1 versions are staged"):
        staging.begin("pro@2", header, mean)
    receiver.broken = "the sender died"
    with pytest.raises(SyncError, match="gloo group is broken: the sender died; join a new one"):
        staging.begin("pro@3", header, mean)


def test_joining_anew_closes_the_old_group(staging: Staging[float], receiver: ScriptedReceiver) -> None:
    staging.use("gloo", ScriptedReceiver())
    assert receiver.closed


def test_shm_needs_no_joining_and_waits_for_the_sender(staging: Staging[float], tmp_path: Path) -> None:
    bucket = pack({"w": torch.full((4,), 5.0)}, dtype="float32", transport="shm", address=str(tmp_path / "pro-1"), adapter_config={"r": 1})  # fmt: skip
    staging.begin("pro@1", bucket.header, mean)
    sender = make_sender("shm", address="", world_size=2, timeout_s=5)
    sender.send(bucket, 5)
    assert staging.take("pro@1", 20) == 5
    sender.close()
