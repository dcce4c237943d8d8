"""Entry points by group and id: listing imports nothing, loading turns a plugin's failure into one clear line.

In: a group and an id. Out: the entry that offers it, or the object it names. Two distributions that offer one id are an
error that names both; there is no silent winner.
"""

from __future__ import annotations

import importlib.util
from importlib import metadata

import msgspec

from selfplay.errors import UnknownNameError, UserError
from selfplay.registry.ids import FORM, split_version

ENVIRONMENTS = "selfplay.environments"
AGENTS = "selfplay.agents"
SCORERS = "selfplay.scorers"
ALGORITHMS = "selfplay.algorithms"
ADAPTERS = "selfplay.adapters"
_KINDS = {
    ADAPTERS: "adapter",
    ENVIRONMENTS: "environment",
    AGENTS: "agent kind",
    SCORERS: "scorer",
    ALGORITHMS: "algorithm",
}


class Entry(msgspec.Struct, frozen=True, kw_only=True, order=True):
    """One id that a distribution offers. ``target`` is ``module:attribute``."""

    group: str
    id: str
    distribution: str
    version: str
    target: str

    @property
    def source(self) -> str:
        """``distribution version``, as recorded in episodes."""
        return f"{self.distribution} {self.version}"

    def problem(self) -> str:
        """What can be seen to be wrong without importing the plugin; empty when nothing is."""
        if self.group == ENVIRONMENTS and split_version(self.id) is None:
            return f"id {self.id[:60]!r} of {self.source} cannot be used: {FORM}"
        module, sep, attribute = self.target.partition(":")
        if not sep or not module or not attribute.isidentifier():
            return f"entry point {self.target!r} of {self.source} is not module:attribute"
        package = module.partition(".")[0]
        try:
            found = importlib.util.find_spec(package) is not None
        except ValueError:  # a module that was put into sys.modules without a spec
            found = True
        return "" if found else f"package {package!r} of {self.source} is missing: reinstall {self.distribution}"


def list_entries(group: str) -> tuple[Entry, ...]:
    """Everything offered in ``group``, sorted by id; the same id twice when two distributions offer it."""
    entries = set()
    for point in metadata.entry_points(group=group):
        name, version = (point.dist.name, point.dist.version) if point.dist else ("unknown", "0")
        entries.add(Entry(group=group, id=point.name, distribution=name, version=version, target=point.value))
    return tuple(sorted(entries, key=lambda e: (e.id, e.distribution)))


def find_entry(group: str, name: str) -> Entry:
    """The one entry ``name``; raises `UnknownNameError` with the nearest ids, or `UserError` when two offer it."""
    entries = list_entries(group)
    offers = [e for e in entries if e.id == name]
    if not offers:
        raise UnknownNameError(_KINDS.get(group, group), _shown(name), (e.id for e in entries))
    if len(offers) > 1:
        raise UserError(
            f"{_KINDS.get(group, group)} {name!r} is offered by {' and by '.join(e.source for e in offers)}: "
            f"uninstall one of them"
        )
    return offers[0]


def load_entry(entry: Entry) -> object:
    """Import what ``entry`` names; whatever the plugin does at import, it ends as a one-line `UserError`."""
    point = metadata.EntryPoint(name=entry.id, value=entry.target, group=entry.group)
    if problem := entry.problem():
        raise UserError(f"{_KINDS.get(entry.group, entry.group)} {entry.id!r} cannot be loaded: {problem}")
    try:
        return point.load()
    except UserError:
        raise
    except (Exception, SystemExit) as e:  # the boundary to plugin code: anything may be raised at import
        raise UserError(
            f"{_KINDS.get(entry.group, entry.group)} {entry.id!r} of {entry.source} cannot be loaded "
            f"(entry point {entry.target}): {one_line(e)}"
        ) from e


def one_line(error: BaseException) -> str:
    """``Type: message`` without line breaks, at most 300 characters."""
    text = " ".join(f"{type(error).__name__}: {error}".split())
    return text if len(text) <= 300 else text[:299] + "…"


def _shown(name: str) -> str:
    return name if len(name) <= 80 else name[:79] + "…"
