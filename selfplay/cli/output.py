"""Where tables go: a row stays one line wherever it may be copied from, searched in or cut by other tools."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console

_NO_LIMIT = 10_000


def console_for_lines(*, always: bool = False) -> Console:
    """Standard output; without a limit on the width unless it is a terminal, or ``always``."""
    from rich.console import Console  # not at the top: --help needs no table

    console = Console()
    return Console(width=_NO_LIMIT) if always or not console.is_terminal else console
