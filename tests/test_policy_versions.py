"""The version registry: what is in use is never dropped, pins hold, retired means nobody starts."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from selfplay.policy.versions import Installed, VersionRefused, VersionRegistry
from selfplay.types import PolicyVersion

V = PolicyVersion


def registry(
    *versions: PolicyVersion, current: bool = True, max_installed: int = 8, lease_s: float = 10.0
) -> VersionRegistry:
    out = VersionRegistry(max_installed, lease_s)
    for v in versions:
        out.begin(v)
        out.commit(v)
        if current:
            out.make_current(v)
    return out


def test_pins() -> None:
    r = registry(V("pro", 0))
    turn = r.acquire("pro", "turn", "1.0", 0.0)
    held = r.acquire("pro", "episode", "1.0", 0.0)
    r.begin(V("pro", 1))
    r.commit(V("pro", 1))
    assert r.acquire("pro", "turn", "1.0", 0.0) is turn, "committed is not current"
    r.make_current(V("pro", 1))
    newer = r.acquire("pro", "turn", "1.0", 0.0)
    assert newer is not None
    assert newer.version == V("pro", 1)
    assert r.acquire("pro", "episode", "1.0", 0.0) is held, "one version per episode"
    assert r.acquire("pro", "episode", "2.0", 0.0) is newer
    exact = r.acquire("pro", 0, "3.0", 0.0)
    assert exact is held
    assert r.acquire("base", "turn", "1.0", 0.0) is None


def test_refusals_name_what_is_there() -> None:
    r = registry(V("pro", 0))
    r.begin(V("con", 0))
    with pytest.raises(VersionRefused, match=r"unknown agent 'pr'.*'pro'") as e:
        r.acquire("pr", "turn", "1.0", 0.0)
    assert e.value.kind == "bad_request"
    with pytest.raises(VersionRefused, match=r"pro@7 cannot be asked.*installed are pro@0"):
        r.acquire("pro", 7, "1.0", 0.0)
    with pytest.raises(VersionRefused, match="no version of con is current") as e:
        r.acquire("con", "turn", "1.0", 0.0)
    assert e.value.kind == "unavailable"
    with pytest.raises(VersionRefused, match="is staging here already"):
        r.begin(V("con", 0))
    with pytest.raises(VersionRefused, match="cannot become current"):
        r.make_current(V("con", 0))
    with pytest.raises(VersionRefused, match="make another one current first"):
        r.retire(V("pro", 0))
    with pytest.raises(VersionRefused, match="not a version of an adapter"):
        r.begin(V("base", 0))


def test_room_is_counted_before_it_is_promised() -> None:
    r = registry(V("pro", 0), max_installed=2)
    r.begin(V("pro", 1))
    with pytest.raises(VersionRefused, match="no room for con@0: 2 versions are held") as e:
        r.begin(V("con", 0))
    assert e.value.kind == "unavailable"
    r.abort(V("pro", 1))
    r.begin(V("con", 0))


def test_a_version_installed_again_has_another_engine_name() -> None:
    r = registry()
    first = r.begin(V("pro", 0)).name
    r.abort(V("pro", 0))
    assert r.begin(V("pro", 0)).name != first


def test_retired_versions_go_when_their_last_user_is_done() -> None:
    r = registry(V("pro", 0), V("pro", 1))
    flying = r.acquire("pro", 0, "", 0.0)
    held = r.acquire("pro", 0, "5.0", 0.0)
    r.release(held, "5.0", 0.0)
    r.retire(V("pro", 0))
    assert r.take_unused() == []
    with pytest.raises(VersionRefused, match="it is retired"):
        r.acquire("pro", 0, "6.0", 0.0)
    again = r.acquire("pro", 0, "5.0", 1.0)
    assert again is held, "an episode that holds it plays on"
    r.release(again, "5.0", 1.0)
    r.release(flying, "", 1.0)
    assert r.take_unused() == []
    r.end_episode("5.0")
    assert [e.version for e in r.take_unused()] == [V("pro", 0)]
    assert r.take_unused() == []


def test_a_silent_episode_loses_its_hold_but_not_its_version_if_it_is_still_there() -> None:
    r = registry(V("pro", 0), lease_s=10.0)
    held = r.acquire("pro", "episode", "1.0", 0.0)
    assert r.expire(100.0) == 0, "a request in flight keeps it"
    r.release(held, "1.0", 100.0)
    assert r.expire(105.0) == 0
    assert r.expire(111.0) == 1
    r.begin(V("pro", 1))
    r.commit(V("pro", 1))
    r.make_current(V("pro", 1))
    back = r.acquire("pro", "episode", "1.0", 120.0)
    assert back is held, "one version per episode, also after silence"
    r.release(back, "1.0", 120.0)
    r.retire(V("pro", 0))
    r.expire(200.0)
    assert [e.version for e in r.take_unused()] == [V("pro", 0)]
    with pytest.raises(VersionRefused, match="was silent for more than 10 s"):
        r.acquire("pro", "episode", "1.0", 210.0)


class Versions(RuleBasedStateMachine):
    """Random installing, using, retiring and forgetting: whatever somebody needs is never handed out for dropping."""

    def __init__(self) -> None:
        super().__init__()
        self.registry = VersionRegistry(5, 10.0)
        self.now = 0.0
        self.flying: list[tuple[Installed, str]] = []
        self.pinned: dict[tuple[str, str], PolicyVersion] = {}
        self.names: set[str] = set()
        self.held = 0

    @rule(agent=st.sampled_from("ab"), number=st.integers(0, 3), fail=st.booleans())
    def install(self, agent: str, number: int, fail: bool) -> None:
        try:
            entry = self.registry.begin(V(agent, number))
        except VersionRefused:
            return
        assert entry.name not in self.names
        self.names.add(entry.name)
        if fail:
            self.registry.abort(V(agent, number))
        else:
            self.registry.commit(V(agent, number))
            self.registry.make_current(V(agent, number))

    @rule(
        agent=st.sampled_from("ab"),
        episode=st.sampled_from(["1.0", "2.0", ""]),
        pin=st.sampled_from(["turn", "episode", 0, 1, 2]),
    )
    def use(self, agent: str, episode: str, pin: str | int) -> None:
        try:
            entry = self.registry.acquire(agent, pin, episode, self.now)  # type: ignore[arg-type]
        except VersionRefused:
            return
        assert entry is not None
        self.flying.append((entry, episode))
        if pin == "episode" and episode:
            assert self.pinned.setdefault((episode, agent), entry.version) == entry.version

    @precondition(lambda self: self.flying)
    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        entry, episode = self.flying.pop(data.draw(st.integers(0, len(self.flying) - 1)))
        self.registry.release(entry, episode, self.now)

    @rule(agent=st.sampled_from("ab"), number=st.integers(0, 3))
    def retire(self, agent: str, number: int) -> None:
        try:
            self.registry.retire(V(agent, number))
        except VersionRefused:
            return

    @rule(episode=st.sampled_from(["1.0", "2.0"]))
    def end(self, episode: str) -> None:
        self.registry.end_episode(episode)
        self.pinned = {k: v for k, v in self.pinned.items() if k[0] != episode}

    @rule(seconds=st.floats(0.0, 15.0))
    def wait(self, seconds: float) -> None:
        self.now += seconds
        self.registry.expire(self.now)

    @invariant()
    def nothing_in_use_is_dropped(self) -> None:
        for gone in self.registry.take_unused():
            assert all(entry is not gone for entry, _ in self.flying)
            assert gone.state == "retired"
        for entry, _ in self.flying:
            assert self.registry.exact(entry.version) is entry

    @invariant()
    def never_more_than_there_is_room_for(self) -> None:
        counts = self.registry.counts()
        assert counts["versions_staging"] + counts["versions_installed"] + counts["versions_retired"] <= 5


Versions.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestVersions = Versions.TestCase
