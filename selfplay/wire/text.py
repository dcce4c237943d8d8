"""Text from models and environments, made harmless for terminals.

Control characters (escape sequences, carriage returns), direction marks and other invisible format characters are
written as visible escapes.
"""

from __future__ import annotations

import unicodedata

HIDDEN = {"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"}
"""Unicode categories that are not shown as they are."""


def safe_text(text: str, *, keep: str = "") -> str:
    """``text`` with hidden characters as ``\\x1b`` or ``\\u202e``; those in ``keep`` (for example ``"\\n"``) stay."""
    if text.isascii() and text.isprintable():
        return text
    return "".join(_escape(c) if c not in keep and unicodedata.category(c) in HIDDEN else c for c in text)


def _escape(char: str) -> str:
    code = ord(char)
    return f"\\x{code:02x}" if code < 256 else f"\\u{code:04x}" if code < 65536 else f"\\U{code:08x}"
