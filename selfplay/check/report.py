"""What a check found: plain data, one `Check` per line of ``selfplay env check``."""

from __future__ import annotations

import shlex
from typing import Literal

import msgspec

Status = Literal["ok", "note", "fault"]
"""ok: as it should be. note: worth knowing, or not checkable here. fault: the environment is not sound."""
MAX_FINDINGS = 5
"""Findings kept per check; how many more there were is told."""


class Finding(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One thing that is wrong, with the place in a game and how to see it again."""

    message: str
    seed: int | None = None
    turn: int | None = None
    seat: str = ""
    reproduce: str = ""
    """A command that plays this very game."""


class Check(msgspec.Struct, frozen=True, kw_only=True):
    """The result of one check. ``text`` is one line for people."""

    name: str
    status: Status
    text: str
    findings: tuple[Finding, ...] = ()
    num_findings: int = 0
    time_s: float = 0.0


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """All checks of one environment with given parameters."""

    env: str
    source: str
    params: dict[str, bool | int | float | str]
    num_games: int
    checks: tuple[Check, ...]

    @property
    def faults(self) -> tuple[Check, ...]:
        """The checks that failed; empty for a sound environment."""
        return tuple(c for c in self.checks if c.status == "fault")


class Faults:
    """Collects the findings of one check while games are played."""

    def __init__(self, env: str, params: dict[str, bool | int | float | str]) -> None:
        self._env, self._params = env, params
        self.kept: list[Finding] = []
        self.num = 0

    def add(self, message: str, *, seed: int | None = None, turn: int | None = None, seat: str = "") -> None:
        """Keep a finding, or count it when enough are kept."""
        self.num += 1
        if len(self.kept) < MAX_FINDINGS:
            line = " ".join(message.split())
            self.kept.append(
                Finding(
                    message=line if len(line) <= 400 else line[:399] + "…", seed=seed, turn=turn, seat=seat,
                    reproduce="" if seed is None else self.command(seed),
                )
            )  # fmt: skip

    def command(self, seed: int) -> str:
        """The command line that plays game ``seed`` of the check again, with the same random moves."""
        given = (f"{k}={msgspec.json.encode(v).decode()}" for k, v in self._params.items())
        params = "".join(f" -p {shlex.quote(item)}" for item in given)
        return f"selfplay play {shlex.quote(self._env)}{params} --players random --seed {seed} --show-private"

    def result(self, name: str, ok: str, time_s: float = 0.0) -> Check:
        """A fault when anything was found, else ok with the text ``ok``."""
        if not self.num:
            return Check(name=name, status="ok", text=ok, time_s=time_s)
        first = self.kept[0]
        place = ", ".join(
            f"{k} {v}"
            for k, v in (("seed", first.seed), ("turn", first.turn), ("seat", first.seat))
            if v not in (None, "")
        )
        more = f" (and {self.num - 1} more)" if self.num > 1 else ""
        text = first.message + (f" [{place}]" if place else "") + more
        return Check(
            name=name, status="fault", text=text, findings=tuple(self.kept), num_findings=self.num, time_s=time_s
        )
