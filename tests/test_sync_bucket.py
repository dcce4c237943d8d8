"""Buckets: bit-exact there and back, and no header, however wrong, reads past the data."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from selfplay.errors import SyncError
from selfplay.sync import Bucket, pack, unpack, verify
from selfplay.wire.codec import Codec
from selfplay.wire.messages import BucketHeader

SHAPES = st.lists(st.integers(1, 6), max_size=3).map(tuple)
NAMES = st.text(st.characters(min_codepoint=33, max_codepoint=126), min_size=1, max_size=30)


def small(dtype: str = "float32") -> Bucket:
    tensors = {"b": torch.arange(6.0).view(2, 3), "a": torch.tensor([-1.5, 2.0]), "c": torch.ones(1, 4)}
    return pack(tensors, dtype=dtype, transport="shm", address="/x", adapter_config={"r": 8})  # type: ignore[arg-type]


@settings(max_examples=60, deadline=None)
@given(
    shapes=st.dictionaries(NAMES, SHAPES, min_size=1, max_size=8),
    dtype=st.sampled_from(["float32", "bfloat16", "float16"]),
    seed=st.integers(0, 2**31),
)
def test_any_tensors_come_back_bit_for_bit(shapes: dict[str, tuple[int, ...]], dtype: Any, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    tensors = {n: torch.randn(s, generator=generator).to(getattr(torch, dtype)) for n, s in shapes.items()}
    bucket = pack(tensors, dtype=dtype, transport="gloo", address="", adapter_config={})
    verify(bucket.header, bucket.data)
    found = unpack(bucket.header, bucket.data.clone())
    assert list(found) == sorted(tensors)
    for name, tensor in tensors.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor)


def test_the_header_survives_the_wire() -> None:
    header, codec = small().header, Codec[BucketHeader](BucketHeader)
    assert codec.decode(codec.encode(header)) == header


def test_unpack_gives_views_and_pack_a_copy() -> None:
    source = torch.ones(4)
    bucket = pack({"a": source}, dtype="float32", transport="shm", address="", adapter_config={})
    source.zero_()
    view = unpack(bucket.header, bucket.data)["a"]
    assert view.sum() == 4
    view[0] = 7
    assert unpack(bucket.header, bucket.data)["a"][0] == 7


@pytest.mark.parametrize("position", [0, 5, 47])
def test_one_flipped_bit_is_refused_with_both_checksums(position: int) -> None:
    bucket = small()
    data = bucket.data.clone()
    data[position] ^= 1
    with pytest.raises(SyncError, match=rf"crc32 [0-9a-f]{{8}}, sent as {bucket.header.crc32:08x}"):
        verify(bucket.header, data)


def test_nothing_and_nan_are_not_sent() -> None:
    with pytest.raises(SyncError, match="without tensors"):
        pack({}, dtype="float32", transport="shm", address="", adapter_config={})
    tensors = {"good": torch.ones(2), "bad": torch.tensor([float("nan")])}
    with pytest.raises(SyncError, match="'bad' is not finite"):
        pack(tensors, dtype="float32", transport="shm", address="", adapter_config={})
    with pytest.raises(SyncError, match="'big' is not finite as float16"):
        pack({"big": torch.tensor([1e6])}, dtype="float16", transport="shm", address="", adapter_config={})


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("position", [0, 17, 99])
def test_a_single_value_that_is_not_finite_is_found(dtype: Any, value: float, position: int) -> None:
    bad = torch.linspace(-3, 3, 100)
    bad[position] = value
    with pytest.raises(SyncError, match="'bad' is not finite"):
        pack({"a": torch.ones(3), "bad": bad}, dtype=dtype, transport="shm", address="", adapter_config={})


HOSTILE: dict[str, dict[str, Any]] = {
    "longer than the data": {"num_bytes": 4096},
    "no bytes": {"num_bytes": 0},
    "negative bytes": {"num_bytes": -48},
    "terabytes": {"num_bytes": 1 << 42},
    "offset before the buffer": {"offset": -1},
    "offset beyond all": {"offset": 1 << 62},
    "crc out of range": {"crc32": 1 << 32},
    "no tensors": {"layout": ()},
    "tensor beyond the end": {"layout": (("a", (12,), 6),)},
    "negative offset": {"layout": (("a", (12,), -4),)},
    "overlap": {"layout": (("a", (6,), 0), ("b", (6,), 3))},
    "gap": {"layout": (("a", (5,), 0), ("b", (6,), 6))},
    "too few elements": {"layout": (("a", (11,), 0),)},
    "same name twice": {"layout": (("a", (6,), 0), ("a", (6,), 6))},
    "negative size": {"layout": (("a", (-2, -6), 0),)},
    "zero size": {"layout": (("a", (0,), 0), ("b", (12,), 0))},
    "product overflows": {"layout": (("a", (1 << 32, 1 << 32, 12), 0),)},
    "too many dimensions": {"layout": (("a", (1, 1, 1, 1, 12), 0),)},
    "name with a newline": {"layout": (("a\nb", (12,), 0),)},
    "empty name": {"layout": (("", (12,), 0),)},
    "endless name": {"layout": (("a" * 10_000, (12,), 0),)},
    "other dtype": {"dtype": "float64"},
    "narrower dtype": {"dtype": "bfloat16"},
}


@pytest.mark.parametrize("change", HOSTILE.values(), ids=HOSTILE.keys())
def test_hostile_headers_are_refused(change: dict[str, Any]) -> None:
    bucket = small()
    with pytest.raises(SyncError):
        unpack(msgspec.structs.replace(bucket.header, **change), bucket.data)


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_no_layout_ever_reads_past_the_data(data: st.DataObject) -> None:
    layout = data.draw(
        st.lists(
            st.tuples(NAMES, st.lists(st.integers(-3, 40), max_size=3).map(tuple), st.integers(-5, 40)), max_size=4
        ).map(tuple)
    )
    bucket = small()
    try:
        found = unpack(msgspec.structs.replace(bucket.header, layout=layout), bucket.data)
    except SyncError:
        return
    assert sum(t.numel() for t in found.values()) == 12


def test_data_of_another_kind_is_refused() -> None:
    bucket = small()
    for data in (
        bucket.data[:-1],
        bucket.data.view(torch.float32),
        bucket.data.view(2, -1),
        bucket.data.repeat_interleave(2)[::2],
    ):
        with pytest.raises(SyncError):
            verify(bucket.header, data)
    shifted = torch.empty(49, dtype=torch.uint8)[1:]
    with pytest.raises(SyncError, match="aligned"):
        unpack(bucket.header, shifted)
