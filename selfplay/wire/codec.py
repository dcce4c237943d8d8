"""Bytes ↔ messages: MessagePack by schema, with limits. The only place where received bytes become objects.

No pickle, no MessagePack extension types, no dynamic types: msgspec decodes straight into the declared structs, so a
frame either is a valid message or raises `WireError`.
"""

from __future__ import annotations

from typing import Generic, TypeVar

import msgspec

from selfplay.errors import WireError

T = TypeVar("T")
MAX_FRAME_BYTES = 64 << 20
"""Frames above this are refused, by ZeroMQ at the socket and again here."""

_encoder = msgspec.msgpack.Encoder()


class Codec(Generic[T]):
    """Encodes and decodes one (union) type."""

    def __init__(self, kind: type[T] | object, *, max_bytes: int = MAX_FRAME_BYTES) -> None:
        self._decoder: msgspec.msgpack.Decoder[T] = msgspec.msgpack.Decoder(kind, ext_hook=_no_extensions)
        self._max_bytes = max_bytes

    def encode(self, message: T) -> bytes:
        """Bytes of a message; raises `WireError` naming the size when it is over the limit."""
        data = encode(message)
        if len(data) > self._max_bytes:
            raise WireError(f"{type(message).__name__} of {len(data)} bytes is over the limit of {self._max_bytes}")
        return data

    def decode(self, data: bytes | memoryview) -> T:
        """The message in ``data``; raises `WireError` for anything that is not exactly one valid message."""
        if len(data) > self._max_bytes:
            raise WireError(f"frame of {len(data)} bytes is over the limit of {self._max_bytes}")
        try:
            return self._decoder.decode(data)
        except (msgspec.DecodeError, msgspec.ValidationError, RecursionError, OverflowError, ValueError) as e:
            raise WireError(f"not a valid message: {e}") from e


def encode(value: object) -> bytes:
    """MessagePack bytes of any plain value; raises `WireError` naming what does not fit."""
    try:
        return _encoder.encode(value)
    except (TypeError, OverflowError, ValueError, UnicodeEncodeError) as e:
        raise WireError(f"{type(value).__name__} cannot be sent: {e}") from e


def clean_text(text: str) -> str:
    """Text that survives the wire: lone surrogates and NUL become U+FFFD. Token ids stay the truth."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace").replace("\0", "\ufffd")


def _no_extensions(code: int, _data: memoryview) -> object:
    raise WireError(f"MessagePack extension type {code} is refused")
