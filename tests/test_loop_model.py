"""A model of the whole loop: pools, buffer, scorers, trainer, sync and crashes in any order, on the real bookkeeping.

The parts are the real ones (leases of the pool, ledger, buffer, admission, version registries of two engines, resume); what
is modelled is who acts next, on a clock that the test turns. Nothing may be lost or doubled, nothing too old trained on, no
version dropped while somebody uses it; and from every state that was ever reached the loop must be able to go on.
"""

from __future__ import annotations

from collections.abc import Iterable

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from episode_samples import encode, episode
from selfplay.buffer import EpisodeBuffer, Ledger, may_train, startable
from selfplay.policy.versions import Installed, VersionRegistry
from selfplay.pool.leases import Leases
from selfplay.store.state import Consumed, PendingMatch, RunState, plan_resume
from selfplay.types import Episode, Match, PolicyVersion

AGENTS = ("pro", "con")
WORKERS = ("w0", "w1")
LEASE_S = 100.0


class Game:
    """One attempt while it is played: which engine has it, and which versions answered so far."""

    def __init__(self, engine: int, began: dict[str, int]) -> None:
        self.engine, self.began = engine, began
        self.used: dict[str, int] = {}
        self.asking: Installed | None = None


class Loop(RuleBasedStateMachine):
    @initialize(
        depth=st.sampled_from([0, 1, 2, None]), limit=st.integers(0, 2), batch=st.integers(1, 2),
        pin=st.sampled_from(["turn", "episode"]), scored=st.booleans(),
    )  # fmt: skip
    def begin(self, depth: int | None, limit: int, batch: int, pin: str, scored: bool) -> None:
        self.depth, self.batch, self.pin, self.scored = depth, batch, pin, scored
        self.limit = limit if depth is None else depth
        self.clock = 0.0
        self.log: list[Episode] = []
        self.engines = [self.new_engine() for _ in range(2)]
        self.versions = dict.fromkeys(AGENTS, 0)
        self.store = dict(self.versions)
        for agent in AGENTS:
            self.install(PolicyVersion(agent, 0))
        self.trained: list[str] = []
        self.resume_from(RunState(step=0, versions=dict(self.versions)))
        self.checkpoint()

    def new_engine(self) -> VersionRegistry:
        return VersionRegistry(max_installed=len(AGENTS) * (self.limit + 2) + 4, lease_s=LEASE_S)

    # ── the controller's memory, and its end ──────────────────────────────────────────────────

    def resume_from(self, state: RunState) -> None:
        plan = plan_resume(state, list(enumerate(self.log))[state.consumed_below :], len(self.log))
        self.buffer = EpisodeBuffer(max_episodes=10**6, max_bytes=10**9)
        self.ledger, self.leases = Ledger(plan.ledger), Leases()
        self.games: dict[str, Game] = {}
        self.began: dict[PendingMatch, dict[str, int]] = {}
        self.arrived: list[tuple[Match, Episode]] = []
        self.replays, self.next_match, self.skip = list(plan.replay), plan.next_match, plan.skip
        self.consumed = Consumed(state.consumed_below, state.consumed_beyond)
        self.step = self.published_step = state.step
        self.versions = dict(state.versions)
        self.published = dict(state.versions)
        self.unpublished: list[str] = []
        for seq in plan.buffer:
            self.put(seq, self.log[seq])

    def put(self, seq: int, found: Episode) -> None:
        self.buffer.put(seq, encode(found), found, ready=not self.scored)

    def checkpoint(self) -> None:
        self.saved = RunState(
            step=self.step, versions=dict(self.versions), consumed_below=self.consumed.below,
            consumed_beyond=self.consumed.beyond, logged=len(self.log), next_match=self.next_match,
            pending=(*sorted(self.began), *self.replays), ledger=self.ledger.snapshot(),
        )  # fmt: skip
        self.saved_trained = list(self.trained)

    @precondition(lambda self: not self.unpublished)
    @rule()
    def the_controller_dies_and_resumes(self) -> None:
        self.engines = [self.new_engine() for _ in range(2)]
        self.trained = list(self.saved_trained)
        self.resume_from(self.saved)
        for agent in AGENTS:
            self.install(PolicyVersion(agent, self.versions[agent]))

    # ── pools ─────────────────────────────────────────────────────────────────────────────────

    def may_start(self) -> int:
        counts = self.ledger.report()
        return startable(
            steps_published=self.published_step, depth=self.limit, batch=self.batch, trained=counts.trained,
            waiting=counts.waiting, in_flight=counts.in_flight,
        )  # fmt: skip

    @precondition(lambda self: self.may_start() > 0)
    @rule(worker=st.sampled_from(WORKERS))
    def start(self, worker: str) -> None:
        if self.replays:
            pending = self.replays.pop(0)
        else:
            while self.next_match in self.skip:
                self.next_match += 1
            pending = PendingMatch(self.next_match, 0)
            self.next_match += 1
        match = episode(pending.index, attempt=pending.attempt).match
        self.ledger.start(match.episode_id)
        self.began[pending] = dict(self.published)
        self.leases.grant(match, worker, self.clock)
        self.games[match.episode_id] = Game(pending.index % 2, dict(self.published))

    def asking(self) -> list[str]:
        return sorted(i for i, g in self.games.items() if g.asking is not None)

    def idle(self) -> list[str]:
        return sorted(i for i, g in self.games.items() if g.asking is None)

    @precondition(lambda self: self.idle())
    @rule(data=st.data(), agent=st.sampled_from(AGENTS))
    def ask(self, data: st.DataObject, agent: str) -> None:
        game_id = data.draw(st.sampled_from(self.idle()))
        game = self.games[game_id]
        game.asking = self.engines[game.engine].acquire(agent, self.pin, game_id, self.clock)  # type: ignore[arg-type]

    @precondition(lambda self: self.asking())
    @rule(data=st.data())
    def answer(self, data: st.DataObject) -> None:
        self.finish_answer(data.draw(st.sampled_from(self.asking())))

    def finish_answer(self, game_id: str) -> None:
        game = self.games[game_id]
        entry = game.asking
        assert entry is not None
        registry = self.engines[game.engine]
        assert registry.exact(entry.version) is entry, "a version in use is never dropped"
        registry.release(entry, game_id, self.clock)
        registry.take_unused()
        agent, number = entry.version.agent, entry.version.version
        if self.pin == "episode":
            assert game.used.get(agent, number) == number, "one version per agent and episode"
        game.used[agent] = min(number, game.used.get(agent, number))
        game.asking = None

    @precondition(lambda self: self.idle())
    @rule(data=st.data(), how=st.sampled_from(["done", "done", "done", "failed"]))
    def end(self, data: st.DataObject, how: str) -> None:
        self.finish_game(data.draw(st.sampled_from(self.idle())), how)

    def finish_game(self, game_id: str, how: str = "done") -> None:
        game = self.games.pop(game_id)
        self.leave(game_id, game)
        match = self.leases.deliver(game_id).match
        if how == "failed":
            self.forget(match)
            self.ledger.fail(game_id, "raised")
            self.leases.ack(game_id)
            return
        used = {a: game.used.get(a, game.began[a]) for a in AGENTS}
        self.arrived.append((match, episode(match.index, attempt=match.attempt, versions=used)))

    def leave(self, game_id: str, game: Game) -> None:
        registry = self.engines[game.engine]
        if game.asking is not None:
            registry.release(game.asking, game_id, self.clock)
        registry.end_episode(game_id)
        registry.take_unused()

    def forget(self, match: Match) -> None:
        self.began.pop(PendingMatch(match.index, match.attempt), None)

    @rule(worker=st.sampled_from(WORKERS))
    def a_worker_dies(self, worker: str) -> None:
        for lease in self.leases.of(worker):
            game_id = lease.match.episode_id
            self.leases.void(game_id)
            self.leave(game_id, self.games.pop(game_id))
            self.void(lease.match)

    def void(self, match: Match) -> None:
        self.forget(match)
        self.ledger.void(match.episode_id, "worker lost")
        self.replays.append(PendingMatch(match.index, match.attempt + 1))

    @precondition(lambda self: self.idle())
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        """As for a game that is too old."""
        game_id = data.draw(st.sampled_from(self.idle()))
        self.leave(game_id, self.games.pop(game_id))
        match = self.leases.deliver(game_id).match
        self.forget(match)
        self.ledger.drop(game_id, "cancelled")
        self.replays.append(PendingMatch(match.index, match.attempt + 1))
        self.leases.ack(game_id)

    # ── collecting and scoring ────────────────────────────────────────────────────────────────

    @precondition(lambda self: self.arrived)
    @rule()
    def collect(self) -> None:
        match, found = self.arrived.pop(0)
        assert self.leases.standing(match.episode_id, "w0") in ("delivered", "unknown")
        self.log.append(found)
        self.forget(match)
        self.ledger.store(match.episode_id)
        self.put(len(self.log) - 1, found)
        self.leases.ack(match.episode_id)

    @precondition(lambda self: self.buffer.num_unready)
    @rule(how=st.sampled_from(["scored", "scored", "failed"]))
    def score(self, how: str) -> None:
        seq = self.buffer.unready()[0][0]
        if how == "scored":
            assert self.buffer.make_ready(seq)
        else:
            self.drop([seq], "scorer failed")

    def drop(self, seqs: Iterable[int], reason: str) -> None:
        for seq in seqs:
            self.buffer.discard(seq)
            self.consumed.add([seq])
            self.ledger.evict(1, reason)

    # ── training and publishing ───────────────────────────────────────────────────────────────

    def may_train(self) -> bool:
        ages = [max(self.versions[a] - v for a, v in began.items()) for began in self.began.values()]
        ages += self.buffer.unready_staleness(self.versions)
        waiting = self.buffer.staleness(self.versions).values()
        return not self.unpublished and may_train(
            batch=self.batch, depth=self.depth, waiting_staleness=waiting, in_flight_staleness=ages
        )

    def drop_stale(self) -> None:
        if self.depth is None:
            stale = self.buffer.drop_stale(self.versions, self.limit)
            self.consumed.add([s.seq for s in stale])
            if stale:
                self.ledger.evict(len(stale), "too stale")

    @precondition(lambda self: self.may_train())
    @rule(moved=st.sampled_from([("pro", "con"), ("pro", "con"), ("pro",), ()]), saves=st.booleans())
    def train(self, moved: tuple[str, ...], saves: bool) -> None:
        self.drop_stale()
        if not self.may_train():
            return
        entries = self.buffer.take(self.batch, self.versions)
        assert max(e.staleness for e in entries) <= self.limit
        self.consumed.add([e.seq for e in entries])
        self.ledger.train(len(entries))
        self.trained += [e.episode.episode_id for e in entries]
        self.step += 1
        for agent in moved:
            self.store[agent] = self.versions[agent] = max(self.versions[agent], self.store[agent]) + 1
        if saves:
            self.checkpoint()
        self.unpublished = list(moved)
        self.published_step += not moved

    @precondition(lambda self: self.unpublished)
    @rule(fails=st.sampled_from([None, None, 0, 1]))
    def publish(self, fails: int | None) -> None:
        """One try for one agent; ``fails``: the engine where it does not arrive. Current on both or on none."""
        agent = self.unpublished[0]
        if not self.install(PolicyVersion(agent, self.versions[agent]), fails):
            assert all(
                r.acquire(agent, "turn", "probe", 0.0).version.version == self.published[agent] for r in self.used_up()
            )
            return
        self.published[agent] = self.versions[agent]
        self.unpublished.pop(0)
        if not self.unpublished:
            self.published_step = self.step

    def used_up(self) -> Iterable[VersionRegistry]:
        """Each engine; what a look at it acquires is released after."""
        for registry in self.engines:
            yield registry
            for entry in list(registry._all.values()):
                entry.uses = sum(g.asking is entry for g in self.games.values())

    def install(self, version: PolicyVersion, fails: int | None = None) -> bool:
        for i, registry in enumerate(self.engines):
            registry.begin(version)
            if i != fails:
                registry.commit(version)
        if fails is not None:
            for registry in self.engines:
                registry.abort(version)
                registry.retire(version)
                registry.take_unused()
            return False
        for registry in self.engines:
            registry.make_current(version)
            for old in [
                v for v in registry._all if v.agent == version.agent and v.version < version.version - self.limit
            ]:
                registry.retire(old)
            registry.take_unused()
        return True

    @rule(seconds=st.sampled_from([1.0, 30.0, 200.0]))
    def time_passes(self, seconds: float) -> None:
        """Leases of silent episodes run out; games that are being answered keep theirs."""
        self.clock += seconds
        for game_id, game in self.games.items():
            if game.asking is None:  # a living game is heard of again and again
                for agent in AGENTS if self.pin == "episode" else ():
                    if agent in game.used:
                        entry = self.engines[game.engine].acquire(agent, "episode", game_id, self.clock)
                        self.engines[game.engine].release(entry, game_id, self.clock)
        for registry in self.engines:
            registry.expire(self.clock)
            registry.take_unused()

    # ── what must always hold ─────────────────────────────────────────────────────────────────

    @invariant()
    def nothing_is_lost_or_doubled(self) -> None:
        if not hasattr(self, "ledger"):
            return
        held = len(self.leases.held(self.clock)) + len(self.arrived)
        report = self.ledger.check(waiting=len(self.buffer), in_flight=held)
        assert len(self.trained) == len(set(self.trained)) == report.trained
        played = [e.match.index for e in self.log]
        assert len(played) == len(set(played)), "no match has two results"

    def teardown(self) -> None:
        """From here on everybody does his part, and nobody dies: the loop makes three more steps."""
        if not hasattr(self, "ledger"):
            return
        goal = self.step + 3
        for _ in range(400):
            if self.step >= goal and not self.unpublished:
                return
            self.everybody_acts()
        raise AssertionError(f"the loop stands still at step {self.step}: {self.ledger.report().equation()}")

    def everybody_acts(self) -> None:
        while self.unpublished:
            self.publish(None)
        for game_id in self.asking():
            self.finish_answer(game_id)
        for game_id in self.idle():
            self.finish_game(game_id)
        while self.arrived:
            self.collect()
        while self.buffer.num_unready:
            self.score("scored")
        if self.may_train():
            self.train(AGENTS, True)
        elif self.may_start() > 0:
            self.start("w0")


TestLoop = Loop.TestCase
TestLoop.settings = settings(max_examples=50, stateful_step_count=60)
