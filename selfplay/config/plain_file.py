"""Reading a file whose place somebody else may have filled: only a plain file, and only up to a size.

A named pipe would hold the reader for ever, and a device never ends. Both are `OSError` here, as is a file beyond the
limit, so that the caller's words for a file that cannot be read fit them too.
"""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path


def read_plain(path: Path, max_bytes: int) -> bytes:
    """The contents of a plain file of at most ``max_bytes``; OSError for everything else."""
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    with os.fdopen(fd, "rb") as f:
        found = os.fstat(fd)
        if not stat.S_ISREG(found.st_mode):
            raise OSError(errno.EINVAL, "not a plain file", str(path))
        if found.st_size > max_bytes:
            raise OSError(errno.EFBIG, f"{found.st_size:,} bytes, at most {max_bytes:,} are read", str(path))
        return f.read(max_bytes)
