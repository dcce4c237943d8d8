"""Text on its way in (fit for the wire) and on its way to a terminal (unable to control it)."""

from __future__ import annotations

import unicodedata

from selfplay.wire.codec import clean_text


def clean(text: str) -> str:
    """`clean_text`, without its cost for the usual plain text."""
    return text if text.isascii() and "\0" not in text else clean_text(text)


def printable(text: str) -> str:
    """Text that is safe to show: control characters, escapes and direction marks become visible ``\\x1b``-like codes.

    Line breaks stay; zero-width joiners stay, since several scripts need them.
    """
    return "".join(c if c == "\n" or _is_plain(c) else _code(c) for c in clean(text))


def _is_plain(char: str) -> bool:
    return char in "\u200c\u200d" or unicodedata.category(char) not in ("Cc", "Cf", "Zl", "Zp")


def _code(char: str) -> str:
    return f"\\x{ord(char):02x}" if ord(char) < 256 else f"\\u{ord(char):04x}"
