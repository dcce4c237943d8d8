"""The verifiers library as it is installed: which environments there are, and each loaded once.

In: names. Out: the library's environment objects, with what loading them did to the process undone: the library takes the
signals that end a program for itself, and environments seed the module-level generators.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
import logging
import os
import random
import re
import signal
from collections.abc import Iterator, Mapping, Sequence
from importlib import metadata
from types import ModuleType
from typing import Any

from selfplay.errors import UserError, install_command
from selfplay.types import Scalar
from selfplay_envs.adapters.common import library, unknown

_NAME = re.compile(r"(?:\w[\w-]{0,63}/)?\w[\w-]{0,63}\Z", re.ASCII)
_REQUIRES = re.compile(r"verifiers(?![\w-])", re.IGNORECASE)
_LOGGER = "verifiers"
SERIES = "0.1.9."
"""Later versions ask models through a client of their own, or have no such environments any more."""


def names() -> Sequence[str]:
    """Installed distributions that ask for verifiers. Imports none of them."""
    _library()
    return sorted({str(d.metadata["Name"]) for d in metadata.distributions() if any(map(_needs_it, d.requires or ()))})


def _needs_it(requirement: str) -> bool:
    return bool(_REQUIRES.match(requirement)) and "extra ==" not in requirement


def found(name: str) -> tuple[str, str, Mapping[str, Scalar]]:
    """(its distribution, or "" for a bare module; its file; the plain parameters of ``load_environment``).

    Raises `UserError` for a name that is none, and for a parameter that must be given but is no plain value.
    """
    _library()
    if not _NAME.match(name):
        raise UserError(
            f"{name[:60]!r} is no environment of verifiers: a name is NAME or OWNER/NAME of letters, digits, '-', '_'"
        )
    module = _module(name)
    plain: dict[str, Scalar] = {}
    for p in inspect.signature(module.load_environment).parameters.values():
        if isinstance(p.default, bool | int | float | str):
            plain[p.name] = p.default
        elif p.default is p.empty and p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL):
            raise UserError(
                f"verifiers:{name} needs a value for {p.name!r}, which has no default: it cannot be had by its id"
            )
    owners = metadata.packages_distributions().get(module.__name__, [])
    return (owners[0] if owners else ""), str(module.__file__), plain


@functools.lru_cache(16)
def loaded(name: str, arguments: tuple[tuple[str, Scalar], ...]) -> Any:
    """The library's environment."""
    with _undone():
        return _library().load_environment(name, **dict(arguments))


@contextlib.contextmanager
def errors_heard() -> Iterator[None]:
    """Raises what the library logs and passes over: a reward function that raises counts as 0 there."""
    heard: list[str] = []
    handler = logging.Handler(logging.ERROR)
    handler.emit = lambda record: heard.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger(_LOGGER).addHandler(handler)
    try:
        yield
    finally:
        logging.getLogger(_LOGGER).removeHandler(handler)
    if heard:
        raise RuntimeError("; ".join(heard))


@contextlib.contextmanager
def _undone() -> Iterator[None]:
    """The module-level generators begin the same whenever it is, and they and the signals' handlers are as before after it."""
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    numpy: Any = importlib.import_module("numpy.random")
    states = random.getstate(), numpy.get_state()
    random.seed(0)
    numpy.seed(0)
    try:
        yield
    finally:
        random.setstate(states[0])
        numpy.set_state(states[1])
        for number, handler in handlers.items():
            signal.signal(number, handler)


@functools.cache
def _library() -> ModuleType:
    found = library("verifiers", "a verifiers: environment", extra="verifiers")
    version = metadata.version("verifiers")
    if not f"{version}.".startswith(SERIES):
        raise UserError(
            f"verifiers {version} is installed, but its rollouts are known here as of {SERIES}x: {install_command('verifiers')}"
        )
    if "VF_LOG_LEVEL" not in os.environ:
        logging.getLogger(_LOGGER).setLevel(logging.WARNING)
        importlib.import_module("datasets").disable_progress_bars()
    return found


def _module(name: str) -> ModuleType:
    """The module of an environment, by the library's own rule."""
    wanted = name.rpartition("/")[2].replace("-", "_")
    try:
        module = importlib.import_module(wanted)
    except ModuleNotFoundError as e:
        if e.name != wanted:
            raise UserError(f"verifiers:{name} needs the package {e.name!r}, which is not installed") from None
        raise unknown("verifiers environment", name, names()) from None
    if not callable(getattr(module, "load_environment", None)):
        raise UserError(f"module {wanted!r} has no load_environment(): it is no environment of verifiers")
    return module
