"""Addresses that are refused, and the file transports: private, whole, and nothing but the bucket is accepted."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from selfplay.errors import ConfigError, SyncError
from selfplay.sync import make_receiver, make_sender, verify
from sync_site import bucket_of


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
