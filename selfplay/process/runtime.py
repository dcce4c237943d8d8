"""One private folder per run for everything that must not outlive it: ipc sockets, shared memory, rendezvous files."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path

PREFIX = "selfplay-"
PARENT_VARIABLE = "SELFPLAY_RUNTIME_DIR"
"""Environment variable that names another place for runtime folders, for machines whose shared memory is tiny."""
_MAX_SOCKET_PATH = 100
"""Unix socket paths end at 107 bytes; some are left for the socket's own name."""
_RANDOM_BYTES, _NAME_BYTES = 9, 30


class RuntimeDir:
    """A folder of mode 0700, in shared memory where the machine has it, with a path short enough for ipc sockets."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @classmethod
    def create(cls) -> RuntimeDir:
        """Make a new one with a name nobody can guess; raises OSError when no candidate place is writable."""
        asked = os.environ.get(PARENT_VARIABLE)
        places = (asked,) if asked else ("/dev/shm", os.environ.get("XDG_RUNTIME_DIR"), tempfile.gettempdir(), "/tmp")
        for parent in places:
            if parent and os.access(parent, os.W_OK | os.X_OK) and _leaves_room(parent):
                return cls(Path(tempfile.mkdtemp(prefix=PREFIX, dir=parent)))
        tried = ", ".join(p for p in places if p)
        raise OSError(
            f"no writable place with a short path for sockets; tried {tried}; {PARENT_VARIABLE} names another"
        )

    def endpoint(self, name: str) -> str:
        """The ipc address of a socket in this folder."""
        return f"ipc://{self.path / name}"

    def file(self, name: str) -> Path:
        return self.path / name

    def remove(self) -> None:
        """Delete the folder and all in it; idempotent."""
        shutil.rmtree(self.path, ignore_errors=True)


def _leaves_room(parent: str) -> bool:
    return len(os.fsencode(parent)) + len(PREFIX) + _RANDOM_BYTES + _NAME_BYTES < _MAX_SOCKET_PATH
