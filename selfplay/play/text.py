"""Text on its way in (fit for the wire) and on its way to a terminal (unable to control it)."""

from __future__ import annotations

from selfplay.wire.codec import clean_text
from selfplay.wire.text import safe_text


def is_plain(text: str) -> bool:
    """Whether `clean_text` would leave it as it is, for sure: nearly all text, and known at once."""
    return text.isascii() and "\0" not in text


def clean(text: str) -> str:
    """`clean_text`, without its cost for the usual plain text."""
    return text if is_plain(text) else clean_text(text)


def printable(text: str) -> str:
    """Text that is safe to show. Line breaks stay, and zero-width joiners, since several scripts need them."""
    return safe_text(clean(text), keep="\n\u200c\u200d")
