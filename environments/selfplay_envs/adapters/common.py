"""What the adapters share: typed parameters from a table, moves by name, a library that may be missing."""

from __future__ import annotations

import importlib
import inspect
import warnings
from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import ModuleType

from selfplay.environment import Environment, named_move
from selfplay.errors import MissingExtraError, UnknownNameError
from selfplay.types import Scalar

EXTRA = "envs"


def library(module: str, feature: str, distribution: str = "", extra: str = EXTRA) -> ModuleType:
    """Import a library, or raise `MissingExtraError` that says how to get it."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # libraries announce at import what they will change one day
            return importlib.import_module(module)
    except ModuleNotFoundError as e:
        if e.name is None or e.name.partition(".")[0] != module.partition(".")[0]:
            raise
        raise MissingExtraError(feature, extra, distribution or module) from e


def unknown(kind: str, name: str, known: Iterable[str]) -> UnknownNameError:
    """The error for a name that a library does not have."""
    return UnknownNameError(kind, name if len(name) <= 80 else name[:79] + "…", known)


def with_parameters(init: Callable[..., None], parameters: Mapping[str, Scalar]) -> Callable[..., None]:
    """``init(self, rng, **values)`` with the signature that declares ``parameters`` with these defaults."""
    kinds = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=value, annotation=type(value))
        for name, value in parameters.items()
    ]
    first = [inspect.Parameter(n, inspect.Parameter.POSITIONAL_OR_KEYWORD) for n in ("self", "rng")]
    init.__signature__ = inspect.Signature([*first, *kinds])  # type: ignore[attr-defined]
    return init


def unique(names: Iterable[str]) -> list[str]:
    """Names on one line each, made different where two are the same."""
    out: list[str] = []
    taken: set[str] = set()
    for name in names:
        base = " ".join(name.split()) or "pass"
        name, number = base, 2
        while name in taken:
            name, number = f"{base} #{number}", number + 1
        taken.add(name)
        out.append(name)
    return out


def best_seats(returns: Mapping[str, float]) -> tuple[str, ...]:
    """The seats with the highest return; nobody when all have the same."""
    top = max(returns.values())
    winners = tuple(s for s, r in returns.items() if r == top)
    return () if len(winners) == len(returns) else winners


class NumberedMoves(Environment):
    """A game whose legal moves are numbers with names. Asks the library once per seat and position."""

    _names: dict[str, dict[str, int]]

    @abstractmethod
    def _legal_numbers(self, seat: str) -> Sequence[int]:
        """The library's numbers of the legal moves of ``seat``."""

    @abstractmethod
    def _name(self, seat: str, number: int) -> str:
        """What ``seat`` calls that move."""

    def moves(self, seat: str) -> dict[str, int]:
        """Name → number of every legal move of ``seat`` in this position."""
        if seat not in self._names:
            numbers = self._legal_numbers(seat)
            names = unique(self._name(seat, n) for n in numbers)
            self._names[seat] = dict(zip(names, numbers, strict=True))
        return self._names[seat]

    def legal_moves(self, seat: str) -> Sequence[str]:
        return list(self.moves(seat))

    def parse(self, seat: str, text: str) -> str:
        return text if text in self.moves(seat) else named_move(text, list(self.moves(seat)))
