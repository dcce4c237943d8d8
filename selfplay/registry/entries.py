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
    fault: str = ""
    """Why a distribution offers nothing, where its own list cannot be read."""

    @property
    def source(self) -> str:
        """``distribution version``, as recorded in episodes."""
        return f"{self.distribution} {self.version}"

    def problem(self) -> str:
        """What can be seen to be wrong without importing the plugin; empty when nothing is."""
        if self.fault:
            return self.fault
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
    """Everything offered in ``group``, sorted by id; the same id twice when two distributions offer it.

    Among the environments a distribution whose list cannot be read is an entry with a `fault`.
    """
    try:
        entries = {_entry(group, point) for point in metadata.entry_points(group=group)}
    except Exception:  # noqa: BLE001 - the boundary to other people's metadata: one broken file must not hide the others
        entries = _entries_one_by_one(group)
    return tuple(sorted(entries, key=lambda e: (e.id, e.distribution)))


def _entry(group: str, point: metadata.EntryPoint) -> Entry:
    name, version = _about(point.dist)
    return Entry(group=group, id=point.name, distribution=name, version=version, target=point.value)


def _entries_one_by_one(group: str) -> set[Entry]:
    """The same with each distribution read for itself; of two of one name the first on the path counts, as in `metadata`."""
    entries = dict[str, set[Entry]]()
    for distribution in metadata.distributions():
        try:
            offered = {_entry(group, point) for point in distribution.entry_points.select(group=group)}
        except Exception as e:  # noqa: BLE001 - as above
            name, version = _about(distribution)
            fault = f"the entry points of {name} {version} cannot be read: {one_line(e)}"
            broken = Entry(group=group, id=name, distribution=name, version=version, target="", fault=fault)
            offered = {broken} if group == ENVIRONMENTS else set()
        for entry in offered:
            entries.setdefault(entry.distribution, offered)
    return {entry for offered in entries.values() for entry in offered}


def _about(distribution: metadata.Distribution | None) -> tuple[str, str]:
    """(name, version) of a distribution as far as its metadata tell; a folder left behind may have none."""
    try:
        if distribution is not None and distribution.name:
            return str(distribution.name), str(distribution.version)
    except Exception:  # noqa: BLE001 - as above
        pass
    return str(getattr(distribution, "_path", "unknown")).rpartition("/")[2].partition("-")[0], "0"


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
