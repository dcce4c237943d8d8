"""From an environment id to its class, its source and an instance.

An id is ``name-vN`` from an entry point, the name alone (the highest version is taken), or the path of a Python file
that holds exactly one `Environment`.
"""

from __future__ import annotations

import hashlib
import importlib.util
import random
import re
import sys
import traceback
from collections.abc import Mapping
from pathlib import Path

import msgspec

from selfplay.environment import Environment
from selfplay.errors import ConfigError, EnvironmentFault, SelfplayError, UserError
from selfplay.registry.entries import ENVIRONMENTS, MAX_ID_CHARS, find_entry, list_entries, load_entry, one_line
from selfplay.registry.isolation import Isolation
from selfplay.registry.parameters import Parameter, check_values, declared_parameters
from selfplay.types import Scalar, derive_seed

_VERSIONED = re.compile(r"(.+)-v(\d{1,9})\Z")


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
        return str(_existing_file(env_id))
    if not env_id or len(env_id) > MAX_ID_CHARS or not env_id.isprintable():
        raise UserError(f"{env_id[:60]!r} is not an environment id: it is empty, too long or has control characters")
    versions = [
        (int(m[2]), e.id) for e in list_entries(ENVIRONMENTS) if (m := _VERSIONED.match(e.id)) and m[1] == env_id
    ]
    return find_entry(ENVIRONMENTS, max(versions)[1] if versions else env_id).id


def is_file_id(env_id: str) -> bool:
    """Whether ``env_id`` is the path of a Python file rather than a registered id."""
    return env_id.endswith(".py")


def load_environment(env_id: str) -> type[Environment]:
    """The environment class behind an id. Imports the plugin, so it belongs into a worker or a one-off command."""
    return _load(env_id).kind


def environment_source(env_id: str) -> str:
    """Where the environment comes from: ``distribution version``, or ``file NAME DIGEST``."""
    return _load(env_id).source


def environment_parameters(env_id: str) -> tuple[Parameter, ...]:
    """The typed parameters that ``__init__`` declares."""
    return _load(env_id).parameters


def make_environment(env_id: str, params: Mapping[str, Scalar], seed: int) -> Environment:
    """One game, ready to be played once, with a random generator of its own.

    Raises `UserError` for a bad id or parameter and `EnvironmentFault` when the constructor itself raises.
    """
    loaded = _load(env_id)
    values = check_values(env_id, loaded.parameters, params)
    try:
        with Isolation(derive_seed(seed, "construction")):
            environment = loaded.kind(random.Random(seed), **values)
            environment.seats = tuple(str(s) for s in environment.seats)
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
        _loaded[resolved] = _load_file(Path(resolved)) if is_file_id(resolved) else _load_registered(resolved)
        _loaded[env_id] = _loaded[resolved]
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
    return _Loaded(kind, entry.source, declared_parameters(env_id, kind.__init__))


def _load_file(path: Path) -> _Loaded:
    digest = hashlib.sha256(path.read_bytes()).hexdigest()[:12]
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
    return _Loaded(found[0], f"file {path.name} {digest}", declared_parameters(path.name, found[0].__init__))


def _existing_file(env_id: str) -> Path:
    try:
        path = Path(env_id).resolve()
        if path.is_file():
            if len(str(path)) > MAX_ID_CHARS:
                raise UserError(f"the path of {path.name} has {len(str(path))} characters; at most {MAX_ID_CHARS} fit")
            return path
    except (OSError, ValueError) as e:
        raise UserError(f"{env_id[:60]!r} is not a readable file: {e}") from None
    raise UserError(f"there is no environment file {env_id[:80]!r}")
