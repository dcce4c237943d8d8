"""A person at the terminal: shown the rules once, then each view; asked for a line of text.

Prompts go to standard error, so that standard output stays free for results. The line is read in a thread of its own.
End of input means that the person has left: the seat then answers with nothing, which forfeits the game by its own rule.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable

from selfplay.agent import Answer, Decision, PlayerContext
from selfplay.play.text import printable
from selfplay.play.threads import in_thread
from selfplay.registry.parameters import check_values


class HumanPlayer:
    """Reads moves with ``read_line`` (None: end of input) and shows text with ``show``. No options."""

    def __init__(
        self,
        context: PlayerContext,
        read_line: Callable[[], str | None] | None = None,
        show: Callable[[str], None] | None = None,
    ) -> None:
        check_values("agent kind human", (), context.options)
        self._seat = context.assignment.seat
        self._read_line, self._show = read_line or _read_line, show or _show
        self._rules_shown = self._left = False

    async def decide(self, decision: Decision) -> Answer:
        if self._left:
            return Answer(text="")
        self._show(self._request(decision))
        line = await in_thread(self._read_line)
        if line is None:
            self._left = True
            self._show(f"[{self._seat}] end of input: you leave the game")
            return Answer(text="")
        return Answer(text=line)

    async def close(self) -> None:
        """Nothing is held; a thread that still waits for a line ends with the process."""

    def _request(self, decision: Decision) -> str:
        parts = []
        if not self._rules_shown:
            self._rules_shown = True
            parts.append(f"[{self._seat}] {decision.rules}")
        parts.append(f"! {decision.complaint}" if decision.complaint else decision.view)
        if decision.legal_moves is not None:
            parts.append(f"legal moves: {', '.join(decision.legal_moves)}")
        return printable("\n".join(parts))


def _read_line() -> str | None:
    """One line of standard input, read from its descriptor: a thread that waits inside `sys.stdin` would hold its lock
    and crash the interpreter at exit. Byte by byte, so that nothing of the next line is taken."""
    print("> ", end="", file=sys.stderr, flush=True)
    line = b""
    while (byte := os.read(0, 1)) not in (b"", b"\n"):
        line += byte
    return line.decode("utf-8", "replace").rstrip("\r") if line or byte else None


def _show(text: str) -> None:
    print(f"\n{text}", file=sys.stderr, flush=True)
