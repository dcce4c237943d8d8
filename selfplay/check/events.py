"""What the checking child is asked and what it tells: one JSON object each."""

from __future__ import annotations

import msgspec

from selfplay.check.report import Check, Report
from selfplay.types import Scalar


class Request(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What to check. ``events`` and ``output`` are descriptors that the child inherits."""

    env: str
    params: dict[str, Scalar]
    num_games: int
    events: int
    output: int
    limit_s: float


class Event(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A check begins, a check is done, all are done, or nothing could be checked."""

    begin: str = ""
    check: Check | None = None
    report: Report | None = None
    error: str = ""
    kind: str = ""
