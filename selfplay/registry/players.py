"""Agent kinds (``llm``, ``random``, ...) by entry point."""

from __future__ import annotations

from typing import cast

from selfplay.agent import PlayerFactory
from selfplay.errors import UserError
from selfplay.registry.entries import AGENTS, find_entry, load_entry

_loaded: dict[str, PlayerFactory] = {}


def load_agent(kind: str) -> PlayerFactory:
    """The factory of an agent kind; raises `UnknownNameError` or, for a broken plugin, a one-line `UserError`."""
    if kind not in _loaded:
        entry = find_entry(AGENTS, kind)
        factory = load_entry(entry)
        if not callable(factory):
            raise UserError(f"agent kind {kind!r} of {entry.source} is not callable (entry point {entry.target})")
        _loaded[kind] = cast(PlayerFactory, factory)
    return _loaded[kind]
