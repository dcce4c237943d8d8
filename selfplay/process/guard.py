"""A child never outlives its parent, however the parent ended, and the last one out removes the runtime folder."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path

from selfplay.process.runtime import RuntimeDir

ORPHANED_EXIT_CODE = 17
_STANDARD_INPUT = 0


def live_with_parent(runtime: Path | None = None, on_orphaned: Callable[[], None] | None = None) -> None:
    """Watch the lifeline (standard input, held open by the parent) and exit at once when it closes.

    Works for SIGKILL of the parent too: the kernel closes the pipe. ``on_orphaned`` runs first (kill own children), then
    the run's runtime folder is removed. Standard input itself becomes empty: code that reads it sees its end, not the
    lifeline.
    """
    lifeline = os.dup(_STANDARD_INPUT)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, _STANDARD_INPUT)
    os.close(nothing)
    threading.Thread(target=_watch, args=(lifeline, runtime, on_orphaned), name="lifeline", daemon=True).start()


def _watch(lifeline: int, runtime: Path | None, on_orphaned: Callable[[], None] | None) -> None:
    try:
        while os.read(lifeline, 4096):
            pass
    except OSError:
        # A lifeline that cannot be read can never report the parent's end: leave now rather than stay for ever.
        pass
    try:
        if on_orphaned is not None:
            on_orphaned()
    finally:
        if runtime is not None:
            RuntimeDir(runtime).remove()
        os._exit(ORPHANED_EXIT_CODE)
