"""Host memory for buckets, used again and again.

Memory that a process has never touched costs several times the copy that fills it, and an allocator returns blocks of
more than 32 MB to the system each time. So a block whose last tensor is gone is kept for the next bucket of about its size.
"""

from __future__ import annotations

import threading
import weakref

import numpy as np
import torch
from torch import Tensor

MAX_FREE = 2
"""Blocks kept while nothing lies in them: one on its way out or in, and one for the version that replaces it."""
MAX_WASTE = 1.25
"""A block is used for a bucket when it is at most this many times as large."""


class HostMemory:
    """Blocks of one process. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._free: list[np.ndarray] = []

    def take(self, num_bytes: int) -> Tensor:
        """uint8 [num_bytes], not initialised. The block is free again when the tensor and all its views are gone."""
        with self._lock:
            fits = [b for b in self._free if num_bytes <= b.nbytes <= MAX_WASTE * num_bytes]
            block = min(fits, key=lambda b: b.nbytes, default=None)
            if block is not None:
                self._free = [b for b in self._free if b is not block]
        if block is None:
            block = np.empty(num_bytes, dtype=np.uint8)
        lent = block[:num_bytes]  # torch holds this view for as long as any tensor over it lives
        weakref.finalize(lent, self._give_back, block).atexit = False
        return torch.from_numpy(lent)

    def _give_back(self, block: np.ndarray) -> None:
        with self._lock:
            self._free = [*self._free, block][-MAX_FREE:]


HOST_MEMORY = HostMemory()
"""The process's own."""
