"""Which versions of which agents are here, which is current, and who still uses which. Pure bookkeeping, no engine.

    begin ──► staging ──commit──► installed ──make_current──► current ──(a newer one becomes current)──► installed
                 └──abort──► gone                                     installed ──retire──► retired ──(unused)──► gone

A version that is in flight, or held by an episode, is never handed out for dropping. Retiring means that nobody starts
on it any more; episodes that hold it play on with it to their end.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Literal

from selfplay.errors import suggestion
from selfplay.types import BASE, PolicyVersion
from selfplay.wire.messages import Pin

MAX_LAPSED = 4096
"""Remembered (episode, agent) pairs whose hold ran out."""


class VersionRefused(Exception):
    """The request names a version that cannot be given. ``unavailable``: asking again later may help."""

    def __init__(self, kind: Literal["bad_request", "unavailable"], message: str) -> None:
        self.kind: Literal["bad_request", "unavailable"] = kind
        super().__init__(message)


@dataclass(eq=False, kw_only=True)
class Installed:
    """One version and its engine name, which no other installation has or will have."""

    version: PolicyVersion
    name: str
    state: Literal["staging", "installed", "retired"] = "staging"
    uses: int = 0
    holders: set[str] = field(default_factory=set)
    """Episodes that will ask for this version again."""


@dataclass(eq=False)
class _Hold:
    installed: Installed
    heard: float


class VersionRegistry:
    """The versions of one server. Times are monotonic seconds given by the caller."""

    def __init__(self, max_installed: int, lease_s: float) -> None:
        self._max, self._lease_s = max_installed, lease_s
        self._all: dict[PolicyVersion, Installed] = {}
        self._current: dict[str, Installed] = {}
        self._holds: dict[tuple[str, str], _Hold] = {}
        self._lapsed: OrderedDict[tuple[str, str], PolicyVersion] = OrderedDict()
        self._serial = 0

    # ── installing ────────────────────────────────────────────────────────────────────────────────

    def begin(self, version: PolicyVersion) -> Installed:
        """Reserve room for a version that is about to arrive."""
        if version in self._all:
            state = self._all[version].state  # one that was given up is gone when nobody uses it any more
            raise VersionRefused(
                "unavailable" if state == "retired" else "bad_request", f"{version} is {state} here already"
            )
        if version.agent == BASE or version.version < 0:
            raise VersionRefused("bad_request", f"{version} is not a version of an adapter")
        if len(self._all) >= self._max:
            raise VersionRefused(
                "unavailable",
                f"no room for {version}: {self._max} versions are held ({self.names()}); games that end make room, and a larger "
                "policy.max_live_adapters has more",
            )
        self._serial += 1
        entry = Installed(version=version, name=f"{version}#{self._serial}")
        self._all[version] = entry
        return entry

    def staging(self, version: PolicyVersion) -> Installed:
        """The entry of a version between `begin` and `commit`."""
        entry = self._all.get(version)
        if entry is None or entry.state != "staging":
            raise VersionRefused("bad_request", f"{version} is not being installed; begin it first")
        return entry

    def commit(self, version: PolicyVersion) -> None:
        """It has arrived: it may be named, and is not current."""
        self.staging(version).state = "installed"

    def abort(self, version: PolicyVersion) -> Installed | None:
        """Forget a version that did not arrive; None when nothing was on its way."""
        entry = self._all.get(version)
        if entry is None or entry.state != "staging":
            return None
        return self._all.pop(version)

    def make_current(self, version: PolicyVersion) -> None:
        """From now on ``turn`` and new ``episode`` pins of its agent mean this version."""
        entry = self._all.get(version)
        if entry is None or entry.state != "installed":
            raise VersionRefused("bad_request", f"{version} cannot become current: installed are {self.names()}")
        self._current[version.agent] = entry

    def retire(self, version: PolicyVersion) -> None:
        """Nobody starts on it any more. Unknown versions are gone already: fine."""
        entry = self._all.get(version)
        if entry is None:
            return
        if entry.state == "staging":
            raise VersionRefused("bad_request", f"{version} is still being installed; abort it instead")
        if self._current.get(version.agent) is entry:
            raise VersionRefused("bad_request", f"{version} is current; make another one current first")
        entry.state = "retired"

    def take_unused(self) -> list[Installed]:
        """Remove and return the retired versions that nobody uses: the caller drops them from the engine."""
        gone = [e for e in self._all.values() if e.state == "retired" and not e.uses and not e.holders]
        for entry in gone:
            del self._all[entry.version]
        return gone

    # ── using ─────────────────────────────────────────────────────────────────────────────────────

    def check_agent(self, agent: str) -> None:
        """Raise `VersionRefused` for an agent that no version of is known, before any work is done for it."""
        if agent != BASE and agent not in self._current and not any(v.agent == agent for v in self._all):
            known = {BASE, *(v.agent for v in self._all)}
            raise VersionRefused("bad_request", f"unknown agent {agent!r}{suggestion(agent, known)}")

    def acquire(self, agent: str, pin: Pin, episode: str, now: float) -> Installed | None:
        """The version that answers, counted as in use until `release`; None is the base model.

        An episode that pins a version (``episode`` or a number) holds it until `end_episode` or until its lease is out.
        Raises `VersionRefused`.
        """
        if agent == BASE:
            return None
        entry = self._current_of(agent) if pin == "turn" else self._pinned(agent, pin, episode, now)
        entry.uses += 1
        return entry

    def release(self, entry: Installed | None, episode: str, now: float) -> None:
        """The request is over; the lease of what its episode holds begins anew."""
        if entry is None:
            return
        entry.uses -= 1
        for key in ((episode, entry.version.agent), (episode, str(entry.version))):
            hold = self._holds.get(key)
            if hold is not None and hold.installed is entry:
                hold.heard = now

    def exact(self, version: PolicyVersion) -> Installed:
        """The entry of an installed version, whoever may start on it."""
        entry = self._all.get(version)
        if entry is None or entry.state == "staging":
            raise VersionRefused("bad_request", f"{version} is not installed; installed are {self.names()}")
        return entry

    def end_episode(self, episode: str) -> None:
        """Let go of everything the episode holds; idempotent."""
        for key in [k for k in self._holds if k[0] == episode]:
            self._let_go(key)
        for key in [k for k in self._lapsed if k[0] == episode]:
            del self._lapsed[key]

    def expire(self, now: float) -> int:
        """Let go of holds nobody was heard of for a lease; how many. Requests in flight keep theirs."""
        out = [k for k, h in self._holds.items() if now - h.heard > self._lease_s and not h.installed.uses]
        for key in out:
            self._lapsed[key] = self._holds[key].installed.version
            self._let_go(key)
        while len(self._lapsed) > MAX_LAPSED:
            self._lapsed.popitem(last=False)
        return len(out)

    # ── looking ───────────────────────────────────────────────────────────────────────────────────

    def names(self) -> str:
        """Installed versions, for messages."""
        return ", ".join(sorted(str(v) for v, e in self._all.items() if e.state != "staging")) or "none"

    def counts(self) -> dict[str, int]:
        """How many versions are in each state, and holds of episodes."""
        states = [e.state for e in self._all.values()]
        return {
            "versions_staging": states.count("staging"),
            "versions_installed": states.count("installed"),
            "versions_retired": states.count("retired"),
            "versions_in_use": sum(e.uses > 0 for e in self._all.values()),
            "episode_holds": len(self._holds),
        }

    def _current_of(self, agent: str) -> Installed:
        entry = self._current.get(agent)
        if entry is not None:
            return entry
        self.check_agent(agent)
        raise VersionRefused("unavailable", f"no version of {agent} is current yet; installed are {self.names()}")

    def _pinned(self, agent: str, pin: Pin, episode: str, now: float) -> Installed:
        key = (episode, agent if pin == "episode" else str(PolicyVersion(agent, int(pin))))
        hold = self._holds.get(key)
        if hold is None:
            hold = _Hold(self._start_on(agent, pin, key), now)
            if episode:
                self._holds[key] = hold
                hold.installed.holders.add(f"{key[0]}/{key[1]}")
        hold.heard = now
        return hold.installed

    def _start_on(self, agent: str, pin: Pin, key: tuple[str, str]) -> Installed:
        lapsed = self._lapsed.pop(key, None)
        if lapsed is not None:
            if lapsed not in self._all:
                raise VersionRefused(
                    "bad_request",
                    f"episode {key[0]} was silent for more than {self._lease_s:g} s and its {lapsed} is gone",
                )
            return self._all[lapsed]
        if pin == "episode":
            return self._current_of(agent)
        version = PolicyVersion(agent, int(pin))
        entry = self._all.get(version)
        if entry is None or entry.state != "installed":
            state = f"it is {entry.state}" if entry else "it is not here"
            raise VersionRefused("bad_request", f"{version} cannot be asked: {state}; installed are {self.names()}")
        return entry

    def _let_go(self, key: tuple[str, str]) -> None:
        hold = self._holds.pop(key)
        hold.installed.holders.discard(f"{key[0]}/{key[1]}")
