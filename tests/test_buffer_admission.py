"""The staleness bound is derived: whatever the order of things, no trained episode is staler than ``depth``."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from episode_samples import encode, episode
from selfplay.buffer import EpisodeBuffer, Ledger, max_started, may_train, startable


@pytest.mark.parametrize(
    ("published", "depth", "batch", "total", "expected"),
    [(0, 0, 8, None, 8), (0, 1, 8, None, 16), (3, 1, 8, None, 40), (3, 2, 8, 4, 32), (0, 1, 8, 0, 0)],
)
def test_most_that_may_be_started(published: int, depth: int, batch: int, total: int | None, expected: int) -> None:
    assert max_started(published, depth, batch, total) == expected


def test_what_failed_makes_room() -> None:
    args: dict[str, Any] = {"steps_published": 0, "depth": 1, "batch": 4, "trained": 0}
    assert startable(**args, waiting=2, in_flight=6) == 0
    assert startable(**args, waiting=2, in_flight=5) == 1
    assert startable(**args, waiting=9, in_flight=9) == 0


@pytest.mark.parametrize(
    ("depth", "batch", "waiting", "in_flight", "may"),
    [
        (0, 4, [0] * 4, [0], False),  # synchronous: everything in flight is waited for
        (0, 4, [0] * 4, [], True),
        (0, 4, [0] * 3, [], False),
        (2, 1, [0], [0, 1], True),
        (2, 1, [0], [2], False),
        (2, 1, [0], [1, 1], False),  # both would have to be in the next step
        (2, 2, [0, 0], [1, 1], True),
        (2, 1, [1], [1, 0], True),
        (1, 1, [1], [0], True),
        (0, 1, [3, 2, 2], [], True),  # late already: waiting longer helps nobody
    ],
)
def test_a_step_waits_for_what_would_come_too_late_and_for_nothing_else(
    depth: int, batch: int, waiting: list[int], in_flight: list[int], may: bool
) -> None:
    assert may_train(batch=batch, depth=depth, waiting_staleness=waiting, in_flight_staleness=in_flight) == may


def test_an_unbounded_stream_waits_for_no_game() -> None:
    assert may_train(batch=2, depth=None, waiting_staleness=[0, 0], in_flight_staleness=[9, 9])
    assert not may_train(batch=2, depth=None, waiting_staleness=[0], in_flight_staleness=[])


class Loop(RuleBasedStateMachine):
    """Pools, buffer, trainer and publisher, in any interleaving, with failures, and agents that sometimes do not move."""

    @initialize(depth=st.integers(0, 2), batch=st.integers(1, 2))
    def begin(self, depth: int, batch: int) -> None:
        self.depth, self.batch = depth, batch
        self.buffer = EpisodeBuffer(max_episodes=(depth + 1) * batch, max_bytes=10**9)
        self.ledger = Ledger()
        self.published = 0
        self.unpublished = False
        self.versions = {"pro": 0, "con": 0}
        self.in_flight: dict[str, dict[str, int]] = {}
        self.next_index = self.next_seq = self.trained_steps = 0
        self.trained: list[int] = []

    def may_start(self) -> int:
        return startable(
            steps_published=self.published, depth=self.depth, batch=self.batch, trained=self.trained_steps * self.batch,
            waiting=len(self.buffer), in_flight=len(self.in_flight),
        )  # fmt: skip

    @precondition(lambda self: self.may_start() > 0)
    @rule(most=st.integers(1, 6))
    def start(self, most: int) -> None:
        for _ in range(min(most, self.may_start())):
            episode_id = f"{self.next_index}.0"
            self.ledger.start(episode_id)
            self.in_flight[episode_id] = dict(self.versions)
            self.next_index += 1

    @precondition(lambda self: self.in_flight)
    @rule(data=st.data(), how=st.sampled_from(["finish", "finish", "finish", "fail", "void"]))
    def end_one(self, data: st.DataObject, how: str) -> None:
        episode_id = data.draw(st.sampled_from(sorted(self.in_flight)))
        began = self.in_flight.pop(episode_id)
        if how != "finish":
            getattr(self.ledger, how)(episode_id, "reason")
            return
        e = episode(int(episode_id.partition(".")[0]), versions=began)
        self.buffer.put(self.next_seq, encode(e), e)
        self.next_seq += 1
        self.ledger.store(episode_id)

    def may_train(self) -> bool:
        ages = [max(self.versions[a] - v for a, v in began.items()) for began in self.in_flight.values()]
        waiting = self.buffer.staleness(self.versions).values()
        return not self.unpublished and may_train(
            batch=self.batch, depth=self.depth, waiting_staleness=waiting, in_flight_staleness=ages
        )

    @precondition(lambda self: self.may_train())
    @rule()
    def train(self) -> None:
        entries = self.buffer.take(self.batch, self.versions)
        assert max(e.staleness for e in entries) <= self.depth
        self.trained += [e.seq for e in entries]
        self.trained_steps += 1
        self.ledger.train(len(entries))
        self.unpublished = True

    @precondition(lambda self: self.unpublished)
    @rule(moved=st.sampled_from([("pro", "con"), ("pro", "con"), ("pro",), ()]))
    def publish(self, moved: tuple[str, ...]) -> None:
        for agent in moved:
            self.versions[agent] += 1
        self.published += 1
        self.unpublished = False

    @invariant()
    def nothing_is_lost_or_doubled(self) -> None:
        if not hasattr(self, "ledger"):
            return
        report = self.ledger.check(waiting=len(self.buffer), in_flight=len(self.in_flight))
        assert report.trained == len(self.trained) == len(set(self.trained))
        assert {*self.trained, *self.buffer.seqs} == set(range(self.next_seq))

    @invariant()
    def nobody_waits_for_ever(self) -> None:
        """Something can always happen: a match can start or end, a step can be taken or published."""
        if hasattr(self, "ledger"):
            assert self.may_start() or self.in_flight or self.unpublished or self.may_train()


Loop.TestCase.settings = settings(max_examples=150, stateful_step_count=50, deadline=None, derandomize=True)
TestLoop = Loop.TestCase


def play_unfairly(seed: int) -> tuple[int, int]:
    """(worst lag, depth) of a run in which the newest matches mostly end first and training never rests."""
    rng = random.Random(seed)
    depth, batch, unfairness = rng.randint(0, 4), rng.randint(1, 5), rng.random()
    step = worst = 0
    waiting: list[int] = []
    flying: list[int] = []  # the step each began at
    for _ in range(400):
        free = startable(
            steps_published=step,
            depth=depth,
            batch=batch,
            trained=step * batch,
            waiting=len(waiting),
            in_flight=len(flying),
        )
        ready = may_train(
            batch=batch,
            depth=depth,
            waiting_staleness=[step - s for s in waiting],
            in_flight_staleness=[step - s for s in flying],
        )
        action = rng.choice(
            ["start"] * bool(free) + ["end"] * bool(flying) + ["train"] * 3 * ready
        )  # raises in a deadlock
        if action == "start":
            flying += [step] * rng.randint(1, free)
        elif action == "end":
            began = flying.pop(-1 if rng.random() < unfairness else rng.randrange(len(flying)))
            waiting += [began] * (rng.random() < 0.9)
        else:
            waiting.sort()
            worst = max(worst, step - waiting[0])
            waiting, step = waiting[batch:], step + 1
    return worst, depth


def test_stragglers_never_come_too_late_and_nothing_waits_for_ever() -> None:
    runs = [play_unfairly(seed) for seed in range(300)]
    assert all(worst <= depth for worst, depth in runs)
    assert sum(worst == depth for worst, depth in runs) > 200, "the bound is tight"


def lag_with_a_count_per_agent(
    *, one_count: bool, batch: int = 4, depth: int = 1, steps: int = 30, idle: int = 0
) -> int:
    """Worst lag when one agent learns in a match, and they take turns; each agent's own count is (depth + its version + 1) ·
    batch − its accepted − its running, unless ``one_count`` holds for all. In the first ``idle`` steps nobody has a signal.

    Raises RuntimeError where no match may start and no step be taken. Matches end as they start: the best case.
    """
    versions, accepted, waiting = [0, 0], [0, 0], list[tuple[int, int]]()
    worst = started = 0
    for step in range(steps):
        while True:
            room = [(depth + v + 1) * batch - a for v, a in zip(versions, accepted, strict=True)]
            if one_count:
                room = [max_started(step, depth, batch) - started] * 2
            if (learner := started % 2) and room[0] > room[1]:
                learner = 0  # its turn, but the other has more room
            if room[learner] <= 0:
                break
            waiting.append((learner, versions[learner]))
            accepted[learner] += 1
            started += 1
        if len(waiting) < batch:
            raise RuntimeError(f"nobody may start and {len(waiting)} of {batch} wait at step {step}")
        taken, waiting = waiting[:batch], waiting[batch:]
        worst = max([worst, *(versions[agent] - version for agent, version in taken)])
        if step >= idle:
            versions = [v + any(agent == a for agent, _ in taken) for a, v in enumerate(versions)]
    return worst


def test_one_count_for_all_agents_bounds_each_and_a_count_per_agent_would_not() -> None:
    """Why there is no count per agent: it lets twice as much be played as can be trained on in time, and when the versions
    stand still, so does it."""
    assert lag_with_a_count_per_agent(one_count=True) == 1
    assert lag_with_a_count_per_agent(one_count=False) > 1
    assert lag_with_a_count_per_agent(one_count=True, idle=10) == 1
    with pytest.raises(RuntimeError, match="nobody may start"):
        lag_with_a_count_per_agent(one_count=False, idle=10)
