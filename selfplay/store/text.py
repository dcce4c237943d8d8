"""Text from models and environments, made harmless for terminals and for JSON lines.

Control characters (escape sequences, carriage returns), direction marks and other invisible format characters are
written as visible escapes. In JSON the escapes are the language's own, so nothing is lost.
"""

from __future__ import annotations

import unicodedata

import msgspec

_HIDDEN = {"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"}


def safe_text(text: str, *, keep: str = "") -> str:
    """``text`` with hidden characters as ``\\x1b`` or ``\\u202e``; those in ``keep`` (for example ``"\\n"``) stay."""
    if text.isascii() and text.isprintable():
        return text
    return "".join(_escape(c) if c not in keep and unicodedata.category(c) in _HIDDEN else c for c in text)


def json_line(value: object) -> str:
    """``value`` as one line of JSON that is also safe to show: hidden characters escaped, NaN and infinities null."""
    text = msgspec.json.encode(value).decode()
    return text if text.isascii() and text.isprintable() else "".join(_json_escape(c) for c in text)


def _escape(char: str) -> str:
    code = ord(char)
    return f"\\x{code:02x}" if code < 256 else f"\\u{code:04x}" if code < 65536 else f"\\U{code:08x}"


def _json_escape(char: str) -> str:
    if unicodedata.category(char) not in _HIDDEN:
        return char
    units = char.encode("utf-16-be", "surrogatepass")
    return "".join(f"\\u{int.from_bytes(units[i : i + 2], 'big'):04x}" for i in range(0, len(units), 2))
