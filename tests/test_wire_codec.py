"""Bytes that arrive: either exactly one valid message, or a `WireError`; never code, never an unlisted object."""

from __future__ import annotations

import math
import os
import pickle
import struct
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from selfplay.errors import WireError
from selfplay.types import Episode, Match, PolicyVersion, SeatAssignment, Turn
from selfplay.wire.codec import Codec, clean_text, encode
from selfplay.wire.messages import (
    ControllerMessage,
    EpisodeDone,
    EpisodeFailed,
    FromPolicy,
    FromTrainer,
    PlayMatch,
    PolicyHello,
    ProbeResult,
    ToPolicy,
    ToTrainer,
    WorkerHello,
    WorkerMessage,
)

UNIONS = {
    "WorkerMessage": WorkerMessage, "ControllerMessage": ControllerMessage, "ToPolicy": ToPolicy,
    "FromPolicy": FromPolicy, "ToTrainer": ToTrainer, "FromTrainer": FromTrainer, "Episode": Episode,
}  # fmt: skip
pack = msgspec.msgpack.Encoder().encode
MATCH = Match(index=3, env="g-v0", seed=5, seats=(SeatAssignment(seat="a", player="llm", agent="pro"),))
EPISODE = Episode(
    match=MATCH, env_source="x 1", turns=(Turn(seat="a", agent="pro", round=0, text="hi", move="hi"),),
    rewards={"a": 1.0}, winners=("a",), ended="natural", reason="done",
)  # fmt: skip


class Canary:
    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (os.environ["CANARY"],)


@pytest.fixture(params=UNIONS)
def codec(request: pytest.FixtureRequest) -> Codec[Any]:
    return Codec(UNIONS[request.param])


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_pickles_are_not_run(codec: Codec[Any], protocol: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CANARY", str(tmp_path / "canary"))
    data = pickle.dumps(Canary(), protocol)
    for frame in (data, pack(data), pack(["done", "1.0", data][:2]) + data):
        with pytest.raises(WireError):
            codec.decode(frame)
    assert not (tmp_path / "canary").exists()


def test_every_extension_type_is_refused(codec: Codec[Any]) -> None:
    body = pickle.dumps(1)
    for code in range(-128, 128):
        ext = pack(msgspec.msgpack.Ext(code, body))
        for frame in (ext, b"\x91" + ext, b"\x92" + pack("done") + ext, b"\x93" + pack("done") + pack("1.0") + ext):
            with pytest.raises(WireError):
                codec.decode(frame)


@pytest.mark.parametrize(
    "frame",
    [
        b"",
        b"\xc1",
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
        b"\xdd\xff\xff\xff\xff",
        b"\xdf\xff\xff\xff\xff",
        b"\xc6\xff\xff\xff\xff",
        b"\xdb\xff\xff\xff\xff",
        b"\x91" * 5000,
        b"\x81\xa1a" * 5000 + b"\xc0",
        b"\xdd\x00\x00\x00\x01" * 13_000,
        b"\xd7\xff" + struct.pack(">Q", 2**64 - 1),
        b"\xc7\x0c\xff" + struct.pack(">Iq", 999_999_999, 2**62),
        pack(["done", "1.0", b"x"])[:-1],
        pack(["done", "1.0", b"x"]) + b"\xc0",
        b"\x93\xa4done\xa3\xff\xfe\xfd\xc4\x00",
        pack({"type": "done", "episode_id": "1.0", "episode": b""}),
        pack({b"nd": True, b"kind": b"O", b"data": pickle.dumps(1)}),
        pack(["__class__"]),
        pack(["os.system", "id"]),
        pack([["done"], "1.0"]),
    ],
)
def test_frames_that_are_no_messages(codec: Codec[Any], frame: bytes) -> None:
    with pytest.raises(WireError):
        codec.decode(frame)


@given(st.binary(max_size=200))
def test_random_bytes_give_a_message_or_a_wire_error(data: bytes) -> None:
    for kind in (WorkerMessage, ToPolicy):
        try:
            Codec[Any](kind).decode(data)
        except WireError:
            continue


@pytest.mark.parametrize("cut", range(1, 60, 7))
def test_half_of_a_message_is_no_message(cut: int) -> None:
    data = Codec[Any](ControllerMessage).encode(PlayMatch(match=MATCH))
    with pytest.raises(WireError):
        Codec[Any](ControllerMessage).decode(data[:-cut])


def test_a_size_limit_is_named_on_both_sides() -> None:
    codec: Codec[Any] = Codec(WorkerMessage, max_bytes=100)
    with pytest.raises(WireError, match=r"EpisodeDone of \d+ bytes is over the limit of 100"):
        codec.encode(EpisodeDone(episode_id="1.0", episode=b"x" * 101))
    with pytest.raises(WireError, match="over the limit of 100"):
        codec.decode(bytes(101))


def test_long_episodes_pass_whole() -> None:
    ids = tuple(range(200_000))
    turn = Turn(
        seat="a", agent="pro", round=0, sampled_ids=ids, logprobs=(-0.25,) * len(ids), text="t", stop_reason="stop"
    )
    episode = msgspec.structs.replace(EPISODE, turns=(turn,))
    codec: Codec[Any] = Codec(WorkerMessage)
    done = codec.decode(codec.encode(EpisodeDone(episode_id="3.0", episode=encode(episode))))
    assert Codec(Episode).decode(done.episode) == episode


@pytest.mark.parametrize(
    "change",
    [
        {"rewards": {"a": "1"}},
        {"rewards": {"a": 2**70 // 2**6 and None}},
        {"rewards": {1: 1.0}},
        {"rewards": {None: 1.0}},
        {"ended": "void"},
        {"winners": "a"},
        {"info": {"x": None}},
        {"info": {"x": [1]}},
        {"match": {"index": -1}},
    ],
)
def test_episodes_of_another_shape_are_refused(change: dict[str, Any]) -> None:
    plain = msgspec.msgpack.decode(encode(EPISODE)) | change
    with pytest.raises(WireError):
        Codec(Episode).decode(pack(plain))


@pytest.mark.parametrize(
    ("value", "says"),
    [
        ({"x": 2**70}, "int"),
        ({"x": "\ud83d"}, "surrogate"),
        ({"x": object()}, "object"),
    ],
)
def test_what_cannot_be_sent_is_a_wire_error(value: object, says: str) -> None:
    with pytest.raises(WireError, match="cannot be sent") as e:
        encode(value)
    assert says in str(e.value).lower() or "64 bit" in str(e.value).lower()


def test_numbers_that_are_not_finite_pass_the_wire_and_are_judged_by_their_readers() -> None:
    codec: Codec[Any] = Codec(FromPolicy)
    logprobs = codec.decode(codec.encode(ProbeResult(request=1, logprobs=(math.nan, -math.inf)))).logprobs
    assert math.isnan(logprobs[0])
    assert logprobs[1] == -math.inf


@given(st.text(st.characters()))
def test_clean_text_can_always_be_sent(text: str) -> None:
    cleaned = clean_text(text)
    assert msgspec.msgpack.decode(encode(cleaned)) == cleaned
    assert "\0" not in cleaned


def test_clean_text_replaces_halves_and_keeps_scripts() -> None:
    assert clean_text("x\ud83d y") == "x\ufffd y"
    assert clean_text("\ud83d\ude00") == "\U0001f600"
    for text in ("สวัสดี", "مرحبا", "👩‍👩‍👧", "naïve"):
        assert clean_text(text) == text


def test_messages_of_one_conversation_are_not_taken_in_another() -> None:
    hello = Codec[Any](WorkerMessage).encode(WorkerHello(protocol=1, worker="w", pid=3))
    with pytest.raises(WireError):
        Codec[Any](ControllerMessage).decode(hello)


def test_bounds_of_fields_hold() -> None:
    codec: Codec[Any] = Codec(WorkerMessage)
    long = EpisodeFailed(episode_id="1.0", kind="environment", message="x" * 20_001)
    with pytest.raises(WireError):
        codec.decode(codec.encode(long))
    with pytest.raises(WireError):
        Codec[Any](ToPolicy).decode(Codec[Any](ToPolicy).encode(PolicyHello(request=-1, protocol=1)))


def test_versions_cross_the_wire_as_names_do() -> None:
    version = PolicyVersion("pro", 3)
    assert Codec(PolicyVersion).decode(encode(version)) == version == PolicyVersion.parse("pro@3")
