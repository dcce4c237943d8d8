"""What an environment may not touch: the process's global random generator and standard output.

An environment that draws from the module-level functions of `random` would depend on what other episodes of the
process do. Each episode owns one `Isolation`, entered around every call into the environment: inside it, the global
generator continues the episode's own stream and prints are counted and dropped; outside, both are as they were.

    with isolation:
        environment.step(moves)
"""

from __future__ import annotations

import ctypes
import io
import random
import sys
from types import TracebackType
from typing import Any, Final

from selfplay.types import derive_seed

_STATE_BYTES: Final = 4 * 625
"""CPython keeps a Mersenne Twister as one int (the index) and 624 words, right after the object header."""
_HEADER_BYTES: Final = object.__basicsize__
_global: Final[Any] = random._inst
"""The generator behind ``random.random()`` and its like."""


class _Counter(io.TextIOBase):
    """A text stream that keeps only how much was written to it, and that nobody can close: all episodes share one."""

    def __init__(self) -> None:
        super().__init__()
        self.num_chars = 0

    def writable(self) -> bool:
        return True

    def write(self, text: str) -> int:
        self.num_chars += len(text)
        return len(text)

    def close(self) -> None:
        """Stays open."""


_sink: Final = _Counter()
_Generator: Final[Any] = random.Random.__base__
"""The generator without Python's layer over it, which triples the time to make one."""


def _state_of(generator: Any) -> memoryview:
    """The state of a generator as writable bytes, valid while the generator lives. Use only where the layout is known."""
    return memoryview((ctypes.c_char * _STATE_BYTES).from_address(id(generator) + _HEADER_BYTES)).cast("B")


def _layout_is_known() -> bool:
    """Whether this interpreter lays a generator out as assumed: tried on private ones, their size checked first."""
    if sys.implementation.name != "cpython":
        return False
    if not _HEADER_BYTES + _STATE_BYTES <= _Generator.__basicsize__ < _HEADER_BYTES + _STATE_BYTES + 16:
        return False
    source, into = random.Random(1), _Generator(2)
    _state_of(into)[:] = _state_of(source)
    return bool(into.getstate() == source.getstate()[1]) and into.random() == source.random()


# Through getstate and setstate one swap takes 25 µs, and a turn needs four of each; as bytes it takes 0.2 µs.
_global_state: Final = _state_of(_global) if _layout_is_known() else None

_HEAD_BYTES: Final = 4 * 17
"""The index and 16 words. A draw moves the index, and what renews or replaces the words renews these: as long as the head
is the same, nobody has drawn or seeded, and nothing need be copied."""
_global_head: Final = None if _global_state is None else _global_state[:_HEAD_BYTES]


class NumpyState:
    """One episode's state of numpy's module-level generator. numpy is never imported for it."""

    def __init__(self, seed: int) -> None:
        self._seed = derive_seed(seed, "numpy random") % 2**32
        self._own: Any = None
        self._outer: Any = None

    def enter(self) -> None:
        """Put the episode's state in."""
        numpy = sys.modules.get("numpy")
        if numpy is None:
            return
        self._outer = numpy.random.get_state()
        if self._own is None:
            numpy.random.seed(self._seed)
        else:
            numpy.random.set_state(self._own)

    def leave(self) -> None:
        """Take the episode's state out and put the process's back; numpy may have been imported in between."""
        numpy = sys.modules.get("numpy")
        if numpy is not None and self._outer is not None:
            self._own = numpy.random.get_state()
            numpy.random.set_state(self._outer)


class Isolation:
    """The global random state and the standard output of one episode. Not re-entrant.

    With ``numpy`` the state behind numpy's module-level functions is the episode's own as well, where numpy is imported;
    that takes about 20 µs per call and is for games that declare ``global_random``.
    """

    def __init__(self, seed: int, *, numpy: bool = False) -> None:
        self._seed, self._numpy = seed, NumpyState(seed) if numpy else None
        self._own: Any = None
        """The episode's state, in the way of this interpreter; None until it is first entered."""
        self._own_head = b""
        self._own_gauss: Any = None
        self._outer: Any = None
        self._outer_head = b""
        self._outer_gauss: Any = None
        self._stdout: Any = None
        self._num_sunk = 0
        self.num_printed_chars = 0
        """How many characters the environment printed so far."""

    def random_was_used(self) -> bool:
        """Whether something drew from, or seeded, the generator behind ``random.random()`` inside this isolation."""
        fresh = random.Random(self._seed)
        untouched = fresh.getstate() if _global_state is None else bytes(_state_of(fresh))
        return self._own is not None and bool(self._own != untouched)

    def __enter__(self) -> None:
        if _global_state is None or _global_head is None:
            self._outer = _global.getstate()
            if self._own is None:
                _global.seed(self._seed)
            else:
                _global.setstate(self._own)
        else:
            if (head := _global_head.tobytes()) != self._outer_head:
                self._outer, self._outer_head = bytes(_global_state), head
            self._outer_gauss, _global.gauss_next = _global.gauss_next, self._own_gauss
            if self._own is None:
                _Generator.seed(_global, self._seed)
            else:
                _global_state[:] = self._own
        self._stdout, sys.stdout = sys.stdout, _sink
        self._num_sunk = _sink.num_chars
        if self._numpy is not None:
            self._numpy.enter()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        sys.stdout = self._stdout
        self.num_printed_chars += _sink.num_chars - self._num_sunk
        if self._numpy is not None:
            self._numpy.leave()
        if _global_state is None or _global_head is None:
            self._own = _global.getstate()
            _global.setstate(self._outer)
        else:
            if (head := _global_head.tobytes()) != self._own_head:
                self._own, self._own_head = bytes(_global_state), head
            _global_state[:] = self._outer
            self._own_gauss, _global.gauss_next = _global.gauss_next, self._outer_gauss
        if error is not None:
            self._failed(error)

    def _failed(self, error: BaseException) -> None:
        """What becomes of an error that the environment raised; the isolation has been left."""
