"""Text in JSON lines, made harmless for terminals: the escapes are the language's own, so nothing is lost."""

from __future__ import annotations

import unicodedata

import msgspec

from selfplay.wire.text import HIDDEN


def json_line(value: object) -> str:
    """``value`` as one line of JSON that is also safe to show: hidden characters escaped, NaN and infinities null."""
    text = msgspec.json.encode(value).decode()
    return text if text.isascii() and text.isprintable() else "".join(_json_escape(c) for c in text)


def _json_escape(char: str) -> str:
    if unicodedata.category(char) not in HIDDEN:
        return char
    units = char.encode("utf-16-be", "surrogatepass")
    return "".join(f"\\u{int.from_bytes(units[i : i + 2], 'big'):04x}" for i in range(0, len(units), 2))
