"""The transports between two real processes: whole adapters through each, and peers that die, stall or disagree.

Run as a script this file is the other process: it reads commands as JSON lines on standard input and answers each.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from selfplay.errors import ConfigError, SelfplayError, SyncError
from selfplay.store.adapters import AdapterStore
from selfplay.sync import Bucket, make_receiver, make_sender, pack, save_adapter, unpack, verify
from selfplay.types import PolicyVersion
from selfplay.wire.messages import BucketHeader

pytestmark = pytest.mark.engine
BOUND_S = 60.0
"""No call below may take longer, whatever its peer does; the calls' own timeouts are much shorter."""
WIDTHS = {"q_proj": (576, 576), "k_proj": (576, 192), "v_proj": (576, 192), "o_proj": (576, 576), "gate_proj": (576, 1536), "up_proj": (576, 1536), "down_proj": (1536, 576)}  # fmt: skip
CONFIG: dict[str, Any] = {"r": 8, "lora_alpha": 16, "target_modules": sorted(WIDTHS)}


def adapter(seed: int, layers: int = 30) -> dict[str, torch.Tensor]:
    """An adapter of the size of SmolLM2-135M's at rank 8: 420 tensors, 2.4 million numbers."""
    generator = torch.Generator().manual_seed(seed)
    out = {}
    for layer in range(layers):
        for name, (into, size) in WIDTHS.items():
            part = "mlp" if name.endswith(("gate_proj", "up_proj", "down_proj")) else "self_attn"
            stem = f"base_model.model.model.layers.{layer}.{part}.{name}"
            out[f"{stem}.lora_A.weight"] = torch.randn(8, into, generator=generator)
            out[f"{stem}.lora_B.weight"] = torch.randn(size, 8, generator=generator)
    return out


def bucket_of(seed: int, dtype: Any, transport: Any, address: str, layers: int = 30) -> Bucket:
    return pack(adapter(seed, layers), dtype=dtype, transport=transport, address=address, adapter_config=CONFIG)


# ── the other process ────────────────────────────────────────────────────────────────────────────


class Peer:
    """What the other process can be told to do; each command is answered by ``ok`` or the error's text."""

    def __init__(self) -> None:
        self.end: Any = None

    def join(self, role: str, transport: Any, address: str, timeout_s: float = 20) -> None:
        if role == "send":
            self.end = make_sender(transport, address=address, world_size=2, timeout_s=timeout_s)
        else:
            self.end = make_receiver(transport, address=address, rank=1, world_size=2, timeout_s=timeout_s)

    def send(self, seed: int, dtype: str, transport: str, address: str, timeout_s: float) -> None:
        self.end.send(bucket_of(seed, dtype, transport, address), timeout_s)

    def receive(self, header: str, timeout_s: float, seed: int) -> None:
        head = msgspec.json.decode(header, type=BucketHeader)
        data = self.end.receive(head, timeout_s)
        verify(head, data)
        for name, tensor in adapter(seed).items():
            found = unpack(head, data)[name]
            assert torch.equal(found, tensor.to(found.dtype)), name

    def announce_and_die(self, header: str) -> None:
        """Dies between its announcement and its broadcast: the receiver is waiting for the bytes by then."""
        head = msgspec.json.decode(header, type=BucketHeader)
        self.end._group.store.set("send/1", f"{head.num_bytes}:{head.crc32:08x}")
        os.kill(os.getpid(), signal.SIGKILL)

    def close(self) -> None:
        self.end.close()


def main() -> None:
    peer = Peer()
    for line in sys.stdin:
        name, arguments = json.loads(line)
        try:
            getattr(peer, name)(**arguments)
            answer = "ok"
        except SelfplayError as e:
            answer = f"{type(e).__name__}: {e}"
        print(json.dumps(answer), flush=True)


class OtherProcess:
    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
        )

    def tell(self, command: str, **arguments: Any) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps([command, arguments]) + "\n")

    def answer(self) -> str:
        assert self.process.stdout is not None
        return str(json.loads(bounded(self.process.stdout.readline)))

    def signal(self, number: int) -> None:
        self.process.send_signal(number)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def close(self) -> None:
        self.kill()
        for pipe in (self.process.stdin, self.process.stdout):
            with contextlib.suppress(BrokenPipeError):
                pipe.close()  # type: ignore[union-attr]


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


def bounded(call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call in a thread and fail if it hangs; returns or raises as the call does."""
    result: list[Any] = []

    def run() -> None:
        try:
            result.append((call(*args, **kwargs), None))
        except BaseException as e:  # noqa: BLE001  handed to the test's thread
            result.append((None, e))

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(BOUND_S)
    assert not thread.is_alive(), f"{call} hangs"
    value, error = result[0]
    if error is not None:
        raise error
    return value


def joined(
    other: OtherProcess, role: str, tmp_path: Path, name: str = "rdv", transport: Any = "gloo"
) -> tuple[Any, str]:
    """Our end and the rendezvous, with the other process at the other end in ``role``."""
    address = f"file://{tmp_path / name}"
    other.tell("join", role=role, transport=transport, address=address)
    if role == "send":
        end = bounded(make_receiver, transport, address=address, rank=1, world_size=2, timeout_s=20)
    else:
        end = bounded(make_sender, transport, address=address, world_size=2, timeout_s=20)
    assert other.answer() == "ok"
    return end, address


def encoded(bucket: Bucket) -> str:
    return msgspec.json.encode(bucket.header).decode()


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


def test_sender_dead_during_the_send(other: OtherProcess, tmp_path: Path) -> None:
    receiver, address = joined(other, "send", tmp_path)
    bucket = bucket_of(1, "float32", "gloo", address)
    other.tell("announce_and_die", header=encoded(bucket))
    with pytest.raises(SyncError, match="the sender did not take part within"):
        bounded(receiver.receive, bucket.header, 10)
    with pytest.raises(SyncError, match="is broken"):
        bounded(receiver.receive, bucket.header, 10)


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


# ── addresses and files ──────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("address", "says"),
    [
        ("tcp://0.0.0.0:4000", "only loopback"),
        ("tcp://10.0.0.7:4000", "only loopback"),
        ("tcp://127.0.0.1:port", "neither file"),
        ("127.0.0.1:4000", "neither file"),
        ("file:///nowhere/at/all/rdv", "does not exist"),
    ],
)
def test_addresses_that_are_refused(address: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        make_sender("gloo", address=address, world_size=2, timeout_s=1)


def test_ranks_and_names_that_are_refused(tmp_path: Path) -> None:
    address = f"file://{tmp_path / 'rdv'}"
    with pytest.raises(ConfigError, match="rank 0 is the trainer"):
        make_receiver("gloo", address=address, rank=0, world_size=2, timeout_s=1)
    with pytest.raises(ConfigError, match="at least one engine"):
        make_sender("gloo", address=address, world_size=1, timeout_s=1)
    with pytest.raises(ConfigError, match="unknown transport 'rdma'; known: nccl, gloo, shm, file"):
        make_sender("rdma", address="", world_size=2, timeout_s=1)  # type: ignore[arg-type]


def test_nccl_without_a_gpu_says_what_to_use(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match=r"sync\.transport=gloo"):
        make_sender("nccl", address=f"file://{tmp_path / 'rdv'}", world_size=2, timeout_s=1)


def test_files_that_are_not_the_bucket_are_refused(tmp_path: Path) -> None:
    receiver = make_receiver("shm", address="", rank=1, world_size=2, timeout_s=1)
    bucket = bucket_of(1, "bfloat16", "shm", str(tmp_path / "b"), layers=1)
    with pytest.raises(SyncError, match=r"nothing appeared at .*/b within 0\.05 s"):
        receiver.receive(bucket.header, 0.05)
    file = tmp_path / f"b.{bucket.header.num_bytes}-{bucket.header.crc32:08x}.bucket"
    file.write_bytes(b"short")
    with pytest.raises(SyncError, match="has 5 bytes; the header says"):
        receiver.receive(bucket.header, 1)
    file.unlink()
    (tmp_path / "real").write_bytes(bytes(bucket.data.numpy()))
    file.symlink_to(tmp_path / "real")
    with pytest.raises(SyncError, match="cannot read the adapter"):
        receiver.receive(bucket.header, 1)
    file.unlink()
    os.mkfifo(file)
    with pytest.raises(SyncError, match="has 0 bytes"):
        receiver.receive(bucket.header, 1)


def test_a_received_bucket_is_private_and_the_file_is_not_for_others(tmp_path: Path) -> None:
    bucket = bucket_of(1, "bfloat16", "shm", str(tmp_path / "b"), layers=1)
    sender = make_sender("shm", address="", world_size=2, timeout_s=1)
    sender.send(bucket, 1)
    (file,) = tmp_path.iterdir()
    assert file.stat().st_mode & 0o777 == 0o600
    data = make_receiver("shm", address="", rank=1, world_size=2, timeout_s=1).receive(bucket.header, 1)
    with file.open("r+b") as f:
        f.write(b"\xff" * 64)
    verify(bucket.header, data)
    sender.close()
    sender.close()
    assert not file.exists()


def test_a_folder_serves_as_address_too(tmp_path: Path) -> None:
    sender = make_sender("shm", address=str(tmp_path), world_size=2, timeout_s=1)
    receiver = make_receiver("shm", address=str(tmp_path), rank=1, world_size=2, timeout_s=1)
    for seed in (1, 2):
        bucket = bucket_of(seed, "bfloat16", "shm", str(tmp_path), layers=1)
        sender.send(bucket, 1)
        verify(bucket.header, receiver.receive(bucket.header, 1))
        assert len(list(tmp_path.iterdir())) == 1
    sender.close()
    assert not list(tmp_path.iterdir())


def test_a_place_that_cannot_be_written_is_a_sync_error(tmp_path: Path) -> None:
    (tmp_path / "plain").write_bytes(b"")
    bucket = bucket_of(1, "bfloat16", "file", str(tmp_path / "plain" / "b"), layers=1)
    with pytest.raises(SyncError, match=r"weight sync over file failed: .*Not a directory"):
        make_sender("file", address="", world_size=2, timeout_s=1).send(bucket, 1)


if __name__ == "__main__":
    main()
