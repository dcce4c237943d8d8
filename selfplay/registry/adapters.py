"""Games of other libraries as ids: ``scheme:name`` through an entry point of group ``selfplay.adapters``.

In: a scheme and a name. Out: an `Environment` class made for that game. The library is imported only then.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib import metadata
from typing import Protocol, runtime_checkable

from selfplay.environment import Environment
from selfplay.errors import UserError
from selfplay.registry.entries import ADAPTERS, find_entry, load_entry
from selfplay.registry.provenance import library_hash


@runtime_checkable
class Adapter(Protocol):
    """What an entry point of group ``selfplay.adapters`` names.

    The class returned by `environment` declares its parameters in the signature of its ``__init__``, like any other.
    """

    distribution: str
    """The library's distribution, whose version goes into every episode."""

    def names(self) -> Sequence[str]:
        """The library's games. Imports the library."""
        ...

    def environment(self, name: str) -> type[Environment]:
        """The class of one game; raises `UserError` with the nearest names for one that the library does not have."""
        ...


def load_adapter(scheme: str) -> Adapter:
    """The adapter of ``scheme``; raises `UnknownNameError`, or a one-line `UserError` for a broken plugin."""
    entry = find_entry(ADAPTERS, scheme)
    found = load_entry(entry)
    if not isinstance(found, Adapter):
        raise UserError(
            f"adapter {scheme!r} of {entry.source} lacks distribution, names or environment ({entry.target})"
        )
    return found


def adapted_source(adapter: Adapter, kind: type[Environment]) -> str:
    """``distribution version hash`` of an adapted game.

    The distribution is the library's, or the ``distribution`` that the class names when others write games for the library.
    """
    owner = str(getattr(kind, "distribution", adapter.distribution))
    return f"{owner} {metadata.version(owner)} {library_hash(sorted({owner, adapter.distribution}), kind)}"
