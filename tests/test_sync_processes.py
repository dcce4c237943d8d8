"""The transports between two real processes: whole adapters through each, and peers that die, stall or disagree."""

from __future__ import annotations

import signal
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from selfplay.errors import SyncError
from selfplay.store.adapters import AdapterStore
from selfplay.sync import make_receiver, make_sender, save_adapter, unpack, verify
from selfplay.types import PolicyVersion
from sync_site import CONFIG, OtherProcess, adapter, bounded, bucket_of, encoded, joined

pytestmark = pytest.mark.engine


@pytest.fixture
def other() -> Iterator[OtherProcess]:
    process = OtherProcess()
    yield process
    process.close()


@pytest.fixture(scope="module")
def steady() -> Iterator[OtherProcess]:
    """One process for the tests that leave it alive."""
    process = OtherProcess()
    yield process
    process.close()


# ── whole adapters ───────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("transport", ["gloo", "shm", "file"])
def test_a_whole_adapter_arrives_bit_for_bit(steady: OtherProcess, tmp_path: Path, transport: Any) -> None:
    sender, address = joined(steady, "receive", tmp_path, transport=transport)
    for seed, dtype in ((1, "bfloat16"), (2, "float32"), (3, "float32")):
        place = address if transport == "gloo" else str(tmp_path / "weights")
        bucket = bucket_of(seed, dtype, transport, place)
        assert len(bucket.header.layout) == 420
        steady.tell("receive", header=encoded(bucket), timeout_s=20, seed=seed)
        bounded(sender.send, bucket, 20)
        assert steady.answer() == "ok"
    bounded(sender.close)
    assert not list(tmp_path.glob("weights*"))


def test_a_tcp_rendezvous_on_loopback_works_too(steady: OtherProcess) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    address = f"tcp://127.0.0.1:{port}"
    steady.tell("join", role="receive", transport="gloo", address=address)
    sender = bounded(make_sender, "gloo", address=address, world_size=2, timeout_s=20)
    assert steady.answer() == "ok"
    bucket = bucket_of(1, "bfloat16", "gloo", address)
    steady.tell("receive", header=encoded(bucket), timeout_s=20, seed=1)
    bounded(sender.send, bucket, 20)
    assert steady.answer() == "ok"


def test_a_published_folder_is_read_without_a_sender(tmp_path: Path) -> None:
    store, version, tensors = AdapterStore(tmp_path), PolicyVersion("pro", 0), adapter(5, layers=2)
    store.publish(version, lambda folder: save_adapter(folder, tensors, CONFIG), parent=None)
    header = store.bucket_header(version)
    data = make_receiver("file", address="", rank=1, world_size=2, timeout_s=5).receive(header, 5)
    verify(header, data)
    found = unpack(header, data)
    assert found.keys() == tensors.keys()
    assert all(torch.equal(found[n], t) for n, t in tensors.items())
    assert header.adapter_config["r"] == 8


# ── peers that die, stall or disagree ────────────────────────────────────────────────────────────


def test_receiver_dead_before_the_send(other: OtherProcess, tmp_path: Path) -> None:
    sender, address = joined(other, "receive", tmp_path)
    other.kill()
    with pytest.raises(SyncError, match="weight sync over gloo failed"):
        bounded(sender.send, bucket_of(1, "float32", "gloo", address), 5)
    with pytest.raises(SyncError, match=r"is broken: .*; join a new one"):
        bounded(sender.send, bucket_of(1, "float32", "gloo", address), 5)
    bounded(sender.close)


def test_receiver_dead_during_the_send(other: OtherProcess, tmp_path: Path) -> None:
    sender, address = joined(other, "receive", tmp_path)
    other.signal(signal.SIGSTOP)
    killer = threading.Timer(0.5, other.kill)
    killer.start()
    large = bucket_of(1, "float32", "gloo", address, layers=240)  # more than the sockets' buffers hold
    with pytest.raises(SyncError, match="a receiver did not take part within 30 s or died"):
        bounded(sender.send, large, 30)
    killer.join()


def test_receiver_dead_after_the_send_then_a_fresh_one_joins(other: OtherProcess, tmp_path: Path) -> None:
    sender, address = joined(other, "receive", tmp_path)
    bucket = bucket_of(1, "bfloat16", "gloo", address)
    other.tell("receive", header=encoded(bucket), timeout_s=20, seed=1)
    bounded(sender.send, bucket, 20)
    assert other.answer() == "ok"
    other.kill()
    with pytest.raises(SyncError):
        bounded(sender.send, bucket, 5)
    fresh = OtherProcess()
    sender, address = joined(fresh, "receive", tmp_path, "rdv-2")
    fresh.tell("receive", header=encoded(bucket), timeout_s=20, seed=1)
    bounded(sender.send, bucket, 20)
    assert fresh.answer() == "ok"
    fresh.close()


def test_a_stalled_receiver_costs_the_timeout_only(other: OtherProcess, tmp_path: Path) -> None:
    sender, address = joined(other, "receive", tmp_path)
    other.signal(signal.SIGSTOP)
    large = bucket_of(1, "float32", "gloo", address, layers=240)
    with pytest.raises(SyncError, match="within 1 s"):
        bounded(sender.send, large, 1)
    other.signal(signal.SIGCONT)


def test_sender_dead_before_the_announcement(other: OtherProcess, tmp_path: Path) -> None:
    receiver, address = joined(other, "send", tmp_path)
    other.kill()
    with pytest.raises(SyncError, match=r"announced nothing over gloo within 0\.5 s"):
        bounded(receiver.receive, bucket_of(1, "float32", "gloo", address).header, 0.5)
    bounded(receiver.close)


def test_sender_dead_during_the_send_then_a_fresh_one_joins(
    other: OtherProcess, steady: OtherProcess, tmp_path: Path
) -> None:
    """The receiving process stays what it was; only the trainer is another."""
    receiver, address = joined(other, "send", tmp_path)
    bucket = bucket_of(1, "float32", "gloo", address)
    other.tell("announce_and_die", header=encoded(bucket))
    with pytest.raises(SyncError, match="the sender did not take part within"):
        bounded(receiver.receive, bucket.header, 10)
    with pytest.raises(SyncError, match="is broken"):
        bounded(receiver.receive, bucket.header, 10)
    bounded(receiver.close)
    receiver, address = joined(steady, "send", tmp_path, "rdv-2")
    steady.tell("send", seed=1, dtype="float32", transport="gloo", address=address, timeout_s=20)
    verify(bucket.header, bounded(receiver.receive, bucket.header, 20))
    assert steady.answer() == "ok"
    bounded(receiver.close)


def test_a_receiver_that_expects_something_else_is_told_so(steady: OtherProcess, tmp_path: Path) -> None:
    """Without the announcement, gloo ends the whole process on a size that differs."""
    receiver, address = joined(steady, "send", tmp_path)
    expected = bucket_of(1, "float32", "gloo", address, layers=1)
    steady.tell("send", seed=1, dtype="bfloat16", transport="gloo", address=address, timeout_s=3)
    with pytest.raises(SyncError, match=r"send 1 is \d+:[0-9a-f]{8} but \d+:[0-9a-f]{8} was expected"):
        bounded(receiver.receive, expected.header, 10)
    assert receiver.broken
    bounded(receiver.close)
    assert steady.answer()  # the sender is alive and has an answer, good or bad


def test_cancelled_before_the_announcement_the_group_stays_good(steady: OtherProcess, tmp_path: Path) -> None:
    receiver, address = joined(steady, "send", tmp_path)
    cancelled, bucket = threading.Event(), bucket_of(7, "bfloat16", "gloo", address)
    threading.Timer(0.2, cancelled.set).start()
    with pytest.raises(SyncError, match="cancelled"):
        bounded(receiver.receive, bucket_of(1, "float32", "gloo", address).header, 30, cancelled)
    assert not receiver.broken
    steady.tell("send", seed=7, dtype="bfloat16", transport="gloo", address=address, timeout_s=20)
    verify(bucket.header, bounded(receiver.receive, bucket.header, 20))
    assert steady.answer() == "ok"


def test_nobody_comes(tmp_path: Path) -> None:
    with pytest.raises(SyncError, match=r"rank 0 could not join the gloo group of 2 at file://.* within 1 s"):
        bounded(make_sender, "gloo", address=f"file://{tmp_path / 'rdv'}", world_size=2, timeout_s=1)
    with pytest.raises(SyncError, match="rendezvous"):
        bounded(make_receiver, "gloo", address="tcp://127.0.0.1:9", rank=1, world_size=2, timeout_s=1)
