"""Who plays what: policy versions, seat assignments, matches.

A `Match` holds everything that decides an episode before its first turn: the same match played by the
same deterministic players gives the same episode, in any worker and at any concurrency.
"""

from __future__ import annotations

import hashlib
import re
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from selfplay.errors import ConfigError

Scalar = bool | int | float | str
"""A parameter value that survives TOML, the command line and the wire unchanged."""

BASE = "base"
"""The frozen base model without any adapter, as a player."""

_NAME = re.compile(r"[a-z0-9][a-z0-9_-]{0,47}\Z")
_RESERVED = {"nul", "prn", "aux", BASE}

ShortText = Annotated[str, Meta(max_length=200)]


class PolicyVersion(msgspec.Struct, frozen=True, order=True, array_like=True):
    """``agent@n``, the only name of weights. Immutable once published; n counts from 0."""

    agent: str
    version: int

    def __str__(self) -> str:
        return f"{self.agent}@{self.version}"

    @classmethod
    def parse(cls, text: str) -> PolicyVersion:
        """Read ``agent@n``; raises `ConfigError` for anything else."""
        agent, sep, number = text.rpartition("@")
        if not sep or not number.isascii() or not number.isdigit() or len(number) > 9:
            raise ConfigError(f"{text!r} is not a policy version; write it as agent@n, for example pro@3")
        return cls(check_name(agent, "agent"), int(number))


def check_name(name: str, kind: str) -> str:
    """Return ``name`` if it is fit for a file name, a metric and an adapter id; else raise `ConfigError`."""
    if not _NAME.match(name) or name in _RESERVED:
        raise ConfigError(
            f"{kind} name {name!r} is not allowed: 1 to 48 of a-z, 0-9, '_' and '-', "
            f"starting with a letter or digit, and not one of {', '.join(sorted(_RESERVED))}"
        )
    return name


class SeatAssignment(msgspec.Struct, frozen=True, kw_only=True):
    """Who sits at one seat.

    ``player`` is a registered agent kind (``llm``, ``random``, ``minimax``, ...). For ``llm``, ``agent`` is an
    adapter lineage or ``base``, and ``pin`` says which version answers: ``"turn"`` the current one at each turn,
    ``"episode"`` the one current at the seat's first turn, or a number for a frozen version.
    """

    seat: ShortText
    player: ShortText
    agent: ShortText
    pin: Literal["turn", "episode"] | int = "turn"
    trained: bool = False
    options: dict[str, Scalar] = {}


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """Caps on one episode. Reaching one ends it as ``truncated``: no invented loss."""

    max_turns: Annotated[int, Meta(ge=1, le=100_000)] = 200
    max_tokens: Annotated[int, Meta(ge=1)] = 65_536
    """Sampled and prompt tokens of all seats together."""
    time_s: Annotated[float, Meta(gt=0)] = 600.0


class Match(msgspec.Struct, frozen=True, kw_only=True):
    """One game to be played. ``attempt`` grows when infrastructure failed and the same match is played again."""

    index: Annotated[int, Meta(ge=0)]
    env: ShortText
    env_params: dict[str, Scalar] = {}
    seed: Annotated[int, Meta(ge=0, le=2**63 - 1)]
    seats: tuple[SeatAssignment, ...]
    limits: Limits = Limits()
    attempt: Annotated[int, Meta(ge=0)] = 0

    @property
    def episode_id(self) -> str:
        """``index.attempt``: unique in a run, and idempotent across resends."""
        return f"{self.index}.{self.attempt}"

    def assignment(self, seat: str) -> SeatAssignment:
        """The assignment of ``seat``; raises KeyError for a seat that is not in the match."""
        for a in self.seats:
            if a.seat == seat:
                return a
        raise KeyError(seat)


def derive_seed(*parts: str | int) -> int:
    """A 63-bit seed from a run seed and names: equal on every machine, process and hash seed."""
    digest = hashlib.blake2b("\x1f".join(map(str, parts)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1
