"""The league's own pages in ``league.sqlite``: snapshots with their digests, incumbents, what the gate said of whom, good versions
to go back to, and who was drawn how often.

In: versions as they are frozen. Out: what a resumed run needs to go on with the same opponents. The games themselves are
`selfplay.league.records`'.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import msgspec

from selfplay.errors import StoreError
from selfplay.league.meetings import Meeting
from selfplay.types import PolicyVersion

Standing = Literal["candidate", "member", "rejected", "evicted"]
_TABLE = """
CREATE TABLE IF NOT EXISTS snapshots (
    agent TEXT NOT NULL, version INTEGER NOT NULL, step INTEGER NOT NULL, digest TEXT NOT NULL, standing TEXT NOT NULL,
    incumbent INTEGER NOT NULL DEFAULT 0, PRIMARY KEY (agent, version)
) STRICT;
CREATE TABLE IF NOT EXISTS good (
    agent TEXT NOT NULL, version INTEGER NOT NULL, step INTEGER NOT NULL, proven INTEGER NOT NULL,
    PRIMARY KEY (agent, version)
) STRICT;
CREATE TABLE IF NOT EXISTS meetings (
    agent TEXT NOT NULL, rule TEXT NOT NULL, opponent TEXT NOT NULL, met INTEGER NOT NULL, expected REAL NOT NULL,
    variance REAL NOT NULL, PRIMARY KEY (agent, rule, opponent)
) STRICT;
"""


class Good(msgspec.Struct, frozen=True, kw_only=True):
    """A version whose training state is kept. ``proven``: the agent was still healthy when the next one was marked."""

    version: PolicyVersion
    step: int
    proven: bool


class Snapshot(msgspec.Struct, frozen=True, kw_only=True):
    """A frozen version. ``member``: others may meet it. ``candidate``: it is still to prove itself at the gate."""

    version: PolicyVersion
    step: int
    digest: str
    standing: Standing
    incumbent: bool = False
    """The best of its agent so far, by the gate."""


class SnapshotPool:
    """Snapshots of all agents; every change is on disk when it returns."""

    def __init__(self, path: Path, *, write: bool = True) -> None:
        """Without ``write`` the file must be there, and nothing of it changes."""
        self._path = path
        try:
            mode = "rwc" if write else "ro"
            self._db = sqlite3.connect(
                f"{path.absolute().as_uri()}?mode={mode}", isolation_level=None, check_same_thread=False, uri=True
            )
            if write:
                self._db.executescript(_TABLE)
        except sqlite3.Error as e:
            raise StoreError(f"{path} cannot be read or written: {e}") from e

    def all(self, agent: str | None = None) -> list[Snapshot]:
        """Snapshots, oldest first."""
        rows = self._run(
            "SELECT agent, version, step, digest, standing, incumbent FROM snapshots ORDER BY step, agent, version"
        )
        found = [
            Snapshot(version=PolicyVersion(a, v), step=s, digest=d, standing=t, incumbent=bool(i))
            for a, v, s, d, t, i in rows
        ]
        return [s for s in found if agent is None or s.version.agent == agent]

    def members(self, agent: str | None = None) -> list[Snapshot]:
        """Those that may be met."""
        return [s for s in self.all(agent) if s.standing == "member"]

    def incumbent(self, agent: str) -> Snapshot | None:
        """The best one of ``agent`` by the gate."""
        return next((s for s in self.all(agent) if s.incumbent), None)

    def add(self, snapshot: Snapshot) -> None:
        """A new snapshot. Raises `StoreError` when that version was frozen with another digest: frozen stays frozen."""
        known = {s.version: s for s in self.all()}.get(snapshot.version)
        if known is not None and known.digest != snapshot.digest:
            raise StoreError(
                f"{snapshot.version} was frozen with digest {known.digest[:16]}… and has {snapshot.digest[:16]}… now: a frozen "
                "version never changes"
            )
        if known is None:
            v = snapshot.version
            values = (v.agent, v.version, snapshot.step, snapshot.digest, snapshot.standing, int(snapshot.incumbent))
            self._run("INSERT INTO snapshots VALUES (?, ?, ?, ?, ?, ?)", values)

    def mark(self, version: PolicyVersion, standing: Standing) -> None:
        """Change a snapshot's standing."""
        self._run(
            "UPDATE snapshots SET standing = ? WHERE agent = ? AND version = ?",
            (standing, version.agent, version.version),
        )

    def crown(self, version: PolicyVersion) -> None:
        """``version`` is its agent's incumbent from now on."""
        self._run("UPDATE snapshots SET incumbent = (version = ?) WHERE agent = ?", (version.version, version.agent))

    def crown_where_none(self, agent: str) -> None:
        """Where the incumbent is gone, the newest member is it: with a gate every member was the best in its time."""
        members = self.members(agent)
        if members and not any(s.incumbent for s in members):
            self.crown(members[-1].version)

    def go_back(self, step: int) -> None:
        """Forget snapshots and good versions of steps after ``step``: a resumed run was set back behind them."""
        self._run("DELETE FROM snapshots WHERE step > ?", (step,))
        self._run("DELETE FROM good WHERE step > ?", (step,))

    # ── good versions ────────────────────────────────────────────────────────────────────────────

    def good(self, agent: str) -> list[Good]:
        """Versions that a rollback can go to, oldest first."""
        rows = self._run("SELECT version, step, proven FROM good WHERE agent = ? ORDER BY step", (agent,))
        return [Good(version=PolicyVersion(agent, v), step=s, proven=bool(p)) for v, s, p in rows]

    def set_good(self, agent: str, marks: Sequence[Good]) -> None:
        """Replace the good versions of an agent."""
        self._run("BEGIN IMMEDIATE")
        self._run("DELETE FROM good WHERE agent = ?", (agent,))
        for mark in marks:
            self._run(
                "INSERT INTO good VALUES (?, ?, ?, ?)", (agent, mark.version.version, mark.step, int(mark.proven))
            )
        self._run("COMMIT")

    # ── meetings ─────────────────────────────────────────────────────────────────────────────────

    def note(self, meetings: Sequence[Meeting]) -> None:
        """Add to the sums."""
        if not meetings:
            return
        self._run("BEGIN IMMEDIATE")
        for m in meetings:
            self._run(
                "INSERT INTO meetings VALUES (?, ?, ?, ?, ?, ?) ON CONFLICT DO UPDATE SET met = met + excluded.met, "
                "expected = expected + excluded.expected, variance = variance + excluded.variance",
                (m.agent, m.rule, m.opponent, m.met, m.expected, m.variance),
            )
        self._run("COMMIT")

    def meetings(self) -> list[Meeting]:
        """All sums, by agent and rule."""
        rows = self._run("SELECT agent, rule, opponent, met, expected, variance FROM meetings ORDER BY 1, 2, 3")
        return [Meeting(agent=a, rule=r, opponent=o, met=m, expected=e, variance=v) for a, r, o, m, e, v in rows]

    def close(self) -> None:
        """Idempotent."""
        self._db.close()

    def _run(self, statement: str, values: tuple[object, ...] = ()) -> list[tuple[Any, ...]]:
        try:
            return self._db.execute(statement, values).fetchall()
        except sqlite3.Error as e:
            raise StoreError(f"{self._path} cannot be read or written: {e}") from e


def league_facts(pool: SnapshotPool) -> dict[str, str]:
    """What a person wants to know of a run's league, as names and short texts."""
    facts: dict[str, list[str]] = {}
    for s in pool.all():
        standing = "best" if s.incumbent and s.standing == "member" else s.standing
        facts.setdefault(f"snapshots {s.version.agent}", []).append(f"@{s.version.version} {standing}")
    for agent in sorted({s.version.agent for s in pool.all()} | {m.agent for m in pool.meetings()}):
        marks = [f"@{g.version.version}{'' if g.proven else ' (on probation)'}" for g in pool.good(agent)]
        facts |= {f"good {agent}": marks} if marks else {}
    for m in pool.meetings():
        rule = f"met by {m.agent} ({m.rule})"
        facts.setdefault(rule, []).append(f"{m.opponent} {m.met} (rule: {m.expected:.1f})")
    return {name: ", ".join(parts) for name, parts in facts.items()}
