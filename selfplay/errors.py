"""Every error selfplay raises on purpose, one type per boundary.

SelfplayError
├── UserError            the user's mistake: one line, exit 2, no traceback
│   ├── ConfigError          a config key or value
│   ├── UnknownNameError     an id nothing is registered under (carries the nearest matches)
│   └── MissingExtraError    a package that an optional extra brings
├── RunError             a fault during a run: one line and where to look, exit 1
│   ├── WorkerError          an environment pool spent its restart budget
│   ├── EngineError          the policy server or its engine failed
│   ├── TrainerError         a trainer rank failed
│   ├── SyncError            a version could not be moved or did not prove itself on the engine
│   ├── StoreError           the run folder cannot be written or read
│   └── StalledError         nothing moved for too long; names who waits for whom
├── WireError            a frame that broke the schema or a limit; counted and dropped at ingress
├── IllegalMove          raised by an environment's ``parse``: the seat may try again
└── EnvironmentFault     an environment's own bug, with env, seed, seat and turn; the episode fails, the run goes on
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable

EXIT_OK, EXIT_FAULT, EXIT_USER = 0, 1, 2


class SelfplayError(Exception):
    """Base of all errors raised on purpose."""


class UserError(SelfplayError):
    """The user asked for something that cannot be: shown as one line, exit code 2."""


class ConfigError(UserError):
    """A config key that does not exist or a value that does not fit."""


class UnknownNameError(UserError):
    """Nothing is registered under this name.

    The message names the kind of thing, the name, and the nearest known names.
    """

    def __init__(self, kind: str, name: str, known: Iterable[str]) -> None:
        self.kind, self.name = kind, name
        super().__init__(f"unknown {kind} {name!r}{suggestion(name, known)}")


def install_command(extra: str) -> str:
    """How to add an extra. By path: the name on the public index belongs to another project."""
    return f"pip install -e '.[{extra}]'  in selfplay's folder"


class MissingExtraError(UserError):
    """A feature needs packages of an extra that is not installed."""

    def __init__(self, feature: str, extra: str, missing: str, command: str = "") -> None:
        command = command or install_command(extra)
        super().__init__(f"{feature} needs the package {missing!r}: install it with  {command}")


class RunError(SelfplayError):
    """A fault while a run goes on: shown as one line, exit code 1."""


class WorkerError(RunError):
    """An environment pool kept dying and its restart budget is spent."""


class EngineError(RunError):
    """The policy server or the engine inside it failed."""


class TrainerError(RunError):
    """A trainer rank failed."""


class SyncError(RunError):
    """An adapter version was not moved whole, or the probe after the move was out of bounds."""


class StoreError(RunError):
    """The run folder cannot be written, or what lies in it is damaged."""


class StalledError(RunError):
    """No progress for too long; the message says who waits for whom."""


class WireError(SelfplayError):
    """A received frame that is not a valid message or breaks a limit."""


class IllegalMove(SelfplayError):
    """A move the rules do not allow. The message is shown to the seat before it tries again."""


class EnvironmentFault(SelfplayError):
    """An environment raised; carries the original traceback and where in the game it happened."""

    def __init__(self, *, env: str, seed: int, seat: str, turn: int, traceback: str) -> None:
        self.env, self.seed, self.seat, self.turn, self.traceback = env, seed, seat, turn, traceback
        last = traceback.strip().splitlines()[-1] if traceback.strip() else "no traceback"
        super().__init__(f"{env} raised at turn {turn} (seat {seat or '-'}, seed {seed}): {last}")


def suggestion(name: str, known: Iterable[str]) -> str:
    """``"; did you mean 'a' or 'b'?"``, or the known names when none is near, or nothing."""
    names = sorted(set(known))
    near = difflib.get_close_matches(name, names, n=3, cutoff=0.5)
    if near:
        return "; did you mean " + " or ".join(repr(n) for n in near) + "?"
    return f"; known: {', '.join(names)}" if names else ""
