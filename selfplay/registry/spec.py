"""What is known of an environment before it is played: plain data that crosses process borders."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from selfplay.environment import Forfeit
from selfplay.registry.parameters import with_preset
from selfplay.types import Scalar


class EnvironmentSpec(msgspec.Struct, frozen=True, kw_only=True):
    """An environment with given parameters, described without keeping its code in this process."""

    id: str
    """The resolved id: with its version, or the absolute path of a file."""
    source: str
    """``distribution version sha256:DIGEST``, or ``file NAME sha256:DIGEST``."""
    seats: tuple[str, ...]
    zero_sum: bool
    reward_range: tuple[float, float]
    max_turns: int
    max_move_tokens: int
    needs_jury: bool
    concurrent: bool = True
    """False: a process can hold only one of its games at a time."""
    forfeit: Forfeit
    parameters: dict[str, Scalar]
    """Every parameter with its default."""
    presets: dict[str, dict[str, Scalar]] = {}
    """Named sets of parameter values, taken with ``preset=NAME``."""
    doc: str
    """First line of the environment's docstring."""
    rules: str
    """The whole docstring."""

    def games_at_once(self, asked: int) -> int:
        """How many games one worker may play at once where ``asked`` are wanted."""
        return asked if self.concurrent else 1

    def values(self, given: Mapping[str, Scalar]) -> dict[str, Scalar]:
        """Every parameter as it is with ``given``; raises `ConfigError` for a preset that does not exist."""
        return self.parameters | with_preset(self.id, self.presets, given)
