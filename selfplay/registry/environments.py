"""From an environment id to its class, its source and an instance.

What an id can be is told in `selfplay.registry.ids`.
"""

from __future__ import annotations

import hashlib
import importlib.util
import random
import sys
import traceback
from collections.abc import Mapping
from pathlib import Path

import msgspec

from selfplay.environment import Environment
from selfplay.errors import ConfigError, EnvironmentFault, SelfplayError, UserError
from selfplay.registry.adapters import adapted_source, load_adapter
from selfplay.registry.entries import ADAPTERS, ENVIRONMENTS, find_entry, list_entries, load_entry, one_line
from selfplay.registry.ids import check_id, existing_file, highest_version, is_file_id, split_adapted
from selfplay.registry.isolation import Isolation
from selfplay.registry.parameters import Parameter, check_values, declared_parameters, with_preset
from selfplay.registry.provenance import HASH_CHARS, content_hash
from selfplay.types import Scalar, derive_seed


class _Loaded(msgspec.Struct, frozen=True):
    kind: type[Environment]
    source: str
    parameters: tuple[Parameter, ...]


_loaded: dict[str, _Loaded] = {}
"""What this process has imported so far, by resolved id: workers make one instance per episode."""


def resolve_environment_id(env_id: str) -> str:
    """The exact id behind ``env_id``: with its version, or the absolute path of a file. Imports no plugin.

    Raises `UnknownNameError` with the nearest ids, or `UserError` for an id that cannot be one.
    """
    if is_file_id(env_id):
        return str(existing_file(env_id))
    if adapted := split_adapted(check_id(env_id)):
        find_entry(ADAPTERS, adapted[0])
        return env_id
    known = [e.id for e in list_entries(ENVIRONMENTS)]
    return find_entry(ENVIRONMENTS, highest_version(env_id, known) or env_id).id


def load_environment(env_id: str) -> type[Environment]:
    """The environment class behind an id. Imports the plugin, so it belongs into a worker or a one-off command."""
    return _load(env_id).kind


def environment_source(env_id: str) -> str:
    """Where the environment comes from: ``distribution version sha256:DIGEST``, or ``file NAME sha256:DIGEST``."""
    return _load(env_id).source


def environment_presets(env_id: str) -> Mapping[str, Mapping[str, Scalar]]:
    """The named sets of parameter values that the environment offers; raises `ConfigError` for one that does not fit."""
    loaded = _load(env_id)
    for name, values in loaded.kind.presets.items():
        check_values(f"{env_id}: preset {name}", loaded.parameters, values)
    return loaded.kind.presets


def environment_parameters(env_id: str) -> tuple[Parameter, ...]:
    """The typed parameters that ``__init__`` declares."""
    return _load(env_id).parameters


def make_environment(
    env_id: str, params: Mapping[str, Scalar], seed: int, isolation: Isolation | None = None
) -> Environment:
    """One game, ready to be played once, with a random generator of its own. ``isolation`` is entered around the
    constructor; a fresh one unless it is given.

    Raises `UserError` for a bad id or parameter and `EnvironmentFault` when the constructor itself raises.
    """
    loaded = _load(env_id)
    given = with_preset(env_id, loaded.kind.presets, params)
    values = check_values(env_id, loaded.parameters, given)
    if missing := sorted(loaded.kind.__abstractmethods__):
        names = ", ".join(f"{name}()" for name in missing)
        raise UserError(f"{env_id}: class {loaded.kind.__name__} has no {names}: every game needs them")
    try:
        with isolation or Isolation(derive_seed(seed, "construction"), numpy=loaded.kind.global_random):
            environment = loaded.kind(random.Random(seed), **values)
            environment.seats = tuple(map(str, environment.seats))
    except ConfigError as e:
        raise ConfigError(f"{env_id}: {e}") from None
    except SelfplayError:
        raise
    except (Exception, SystemExit) as e:  # the boundary to the environment's code
        raise EnvironmentFault(env=env_id, seed=seed, seat="", turn=0, traceback=traceback.format_exc()) from e
    return environment


def _load(env_id: str) -> _Loaded:
    if env_id not in _loaded:
        resolved = resolve_environment_id(env_id)
        if is_file_id(resolved):
            found = _load_file(Path(resolved))
        elif adapted := split_adapted(resolved):
            found = _load_adapted(resolved, *adapted)
        else:
            found = _load_registered(resolved)
        _loaded[env_id] = _loaded[resolved] = found
    return _loaded[env_id]


def _load_registered(env_id: str) -> _Loaded:
    entry = find_entry(ENVIRONMENTS, env_id)
    with Isolation(0):
        kind = load_entry(entry)
    if not (isinstance(kind, type) and issubclass(kind, Environment)):
        raise UserError(
            f"environment {env_id!r} of {entry.source} is not a subclass of selfplay.environment.Environment "
            f"(entry point {entry.target})"
        )
    return _Loaded(kind, f"{entry.source} {content_hash(kind)}", declared_parameters(env_id, kind.__init__))


def _load_adapted(env_id: str, scheme: str, name: str) -> _Loaded:
    try:
        with Isolation(0):
            adapter = load_adapter(scheme)
            kind = adapter.environment(name)
    except UserError:
        raise
    except (Exception, SystemExit) as e:  # the boundary to the other library's code
        raise UserError(f"{env_id} cannot be loaded: {one_line(e)}") from e
    return _Loaded(kind, adapted_source(adapter, kind), declared_parameters(env_id, kind.__init__))


def _load_file(path: Path) -> _Loaded:
    digest = hashlib.sha256(path.read_bytes()).hexdigest()[:HASH_CHARS]
    name = f"selfplay_file_{digest}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise UserError(f"{path} cannot be loaded as a Python module")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # so that classes of the file can be found by their module's name
    try:
        with Isolation(0):
            spec.loader.exec_module(module)
    except (Exception, SystemExit) as e:  # the boundary to the file's code
        del sys.modules[name]
        raise UserError(f"{path} cannot be loaded: {one_line(e)}") from e
    found = [
        v for k, v in vars(module).items()
        if isinstance(v, type) and issubclass(v, Environment) and v.__module__ == name and not k.startswith("_")
    ]  # fmt: skip
    if len(found) != 1:
        names = ", ".join(k.__name__ for k in found) or "none"
        raise UserError(f"{path} must hold exactly one Environment subclass, found {len(found)}: {names}")
    parameters = declared_parameters(path.name, found[0].__init__)
    return _Loaded(found[0], f"file {path.name} {content_hash(found[0])}", parameters)
