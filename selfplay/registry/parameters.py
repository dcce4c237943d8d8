"""Typed parameters of environments and options of agents: declared by a signature or a table, checked by name and type."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterable, Mapping

import msgspec

from selfplay.errors import ConfigError, UserError, suggestion
from selfplay.types import Scalar

_KINDS: dict[str, type[bool] | type[int] | type[float] | type[str]] = {
    "bool": bool,
    "int": int,
    "float": float,
    "str": str,
}


class Parameter(msgspec.Struct, frozen=True, kw_only=True):
    """A parameter with its kind (``bool``, ``int``, ``float`` or ``str``) and default."""

    name: str
    kind: str
    default: Scalar


def declared_parameters(owner: str, init: Callable[..., object]) -> tuple[Parameter, ...]:
    """The keyword parameters of an environment's ``__init__`` after ``self`` and ``rng``.

    Raises `UserError` for one that has no default or no kind among bool, int, float and str.
    """
    out = []
    for p in list(inspect.signature(init).parameters.values())[2:]:
        if p.kind in (p.VAR_KEYWORD, p.VAR_POSITIONAL):
            raise UserError(f"{owner}: parameter *{p.name} is not allowed: name every parameter and give it a default")
        kind = _kind_of(p)
        if p.default is p.empty or kind is None or not _fits(p.default, kind):
            raise UserError(f"{owner}: parameter {p.name!r} needs a default of kind bool, int, float or str")
        out.append(Parameter(name=p.name, kind=kind, default=_KINDS[kind](p.default)))
    return tuple(out)


def check_values(owner: str, parameters: Iterable[Parameter], given: Mapping[str, Scalar]) -> dict[str, Scalar]:
    """All parameters with their effective values; raises `ConfigError` for an unknown name or a wrong kind."""
    declared = {p.name: p for p in parameters}
    for name, value in given.items():
        if name not in declared:
            near = suggestion(name, declared) or "; it has no parameters"
            raise ConfigError(f"{owner} has no parameter {name!r}{near}")
        if not _fits(value, declared[name].kind):
            hint = f"; quote it: {name}='\"{value}\"'" if declared[name].kind == "str" else ""
            raise ConfigError(
                f"{owner}: parameter {name!r} is {value!r} ({type(value).__name__}), expected {declared[name].kind}{hint}"
            )
    return {name: _KINDS[p.kind](given.get(name, p.default)) for name, p in declared.items()}


PRESET = "preset"


def with_preset(
    owner: str, presets: Mapping[str, Mapping[str, Scalar]], given: Mapping[str, Scalar]
) -> dict[str, Scalar]:
    """``given`` with the values of its preset filled in; raises `ConfigError` for a preset that does not exist."""
    if PRESET not in given or not presets:
        return dict(given)
    name = given[PRESET]
    if name not in presets:
        raise ConfigError(f"{owner} has no preset {name!r}{suggestion(str(name), presets)}")
    return {**presets[str(name)], **{k: v for k, v in given.items() if k != PRESET}}


def _kind_of(parameter: inspect.Parameter) -> str | None:
    annotation = parameter.annotation
    if annotation is parameter.empty:
        annotation = type(parameter.default)
    name = annotation if isinstance(annotation, str) else getattr(annotation, "__name__", "")
    return name if name in _KINDS else None


def _fits(value: object, kind: str) -> bool:
    """Whether a value can stand for the kind; digits are text too, since ``name=11`` on a command line reads as a number."""
    if kind == "float":
        return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= sys.float_info.max
    if kind == "int":
        return isinstance(value, int) and not isinstance(value, bool) and -(2**63) <= value < 2**63
    if kind == "str":
        return isinstance(value, str | int) and not isinstance(value, bool)
    return isinstance(value, _KINDS[kind])
