"""The loop of a run: who plays, who learns, what is current.

    ┌─ dispatch ─ while admission allows: next match ──► pool
    │                                                     │ whole episodes
    ├─ collect ── durable in the episode log ─► ack ─► buffer
    │                                                     │ batch of whole episodes, first in first out
    ├─ train ──── advantages ─► segments ─► every rank ─► checkpoint ─► publish each moved agent
    │                                                                     │ current on every engine
    └─ watch ──── children alive? anything moving? ◄──────────────────────┘

Generation runs at most ``buffer.depth`` batches ahead of training, so no trained episode is older than ``depth`` versions:
`startable` is the only throttle, and it waits for nothing but finished steps. An episode is acknowledged to its worker
only when it is durable. A checkpoint is complete before the versions in it are published. Every wait is named (`Waits`).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from typing import Any

from selfplay.buffer import may_train, startable
from selfplay.config import Config
from selfplay.config.derive import awaited_lag, version_lag
from selfplay.controller.collector import Collector
from selfplay.controller.evaluator import Evaluations
from selfplay.controller.league_link import LeagueLink
from selfplay.controller.memory import Memory
from selfplay.controller.publisher import Publisher, SyncReport
from selfplay.controller.report import AgentStep, Observer, Status, StepReport, batch_figures, flat_metrics
from selfplay.controller.scoring_stage import ScoringStage
from selfplay.controller.trainer_link import TrainerLink
from selfplay.controller.waits import Waits
from selfplay.errors import RunError, StalledError
from selfplay.league import LeagueRecords, Matchmaker
from selfplay.league.league import League
from selfplay.pool import PoolSupervisor
from selfplay.scoring import (
    Algorithm,
    action_counts,
    agents_with_signal,
    episode_segments,
    sequence_counts,
    turn_credit,
)
from selfplay.scoring.packing import plan_micro_batches
from selfplay.scoring.scored import Weighted, rewarded, with_teachers, with_turn_rewards
from selfplay.scoring.segments import SegmentAges, learning_now, segment_ages
from selfplay.store.checkpoints import Checkpoints
from selfplay.store.episode_log import EpisodeLog
from selfplay.store.metrics import MetricsLog
from selfplay.store.state import PendingMatch
from selfplay.types import Episode, PolicyVersion, Segment
from selfplay.wire.messages import AgentReport, StepDone

STATUS_EVERY_S = 0.5
TRAINER_FOLDER = "trainer"
WAITING = "waiting for episodes"
DRAINING = "waiting for games under way to end"


class Controller:
    """Runs a training run from its present state to its last step, an interruption, or a fault."""

    def __init__(
        self,
        *,
        config: Config,
        log: EpisodeLog,
        metrics: MetricsLog,
        checkpoints: Checkpoints,
        matchmaker: Matchmaker | League,
        pool: PoolSupervisor,
        trainer: TrainerLink,
        publisher: Publisher,
        league: LeagueRecords,
        algorithm: Algorithm,
        memory: Memory,
        observer: Observer,
        reward_range: tuple[float, float],
        find_fault: Callable[[], RunError | None],
        waits: Waits,
        scoring: ScoringStage,
        league_link: LeagueLink | None = None,
        evaluator: Evaluations | None = None,
    ) -> None:
        self._league_link = league_link
        self._config, self._matchmaker, self._pool = config, matchmaker, pool
        self._metrics, self._checkpoints = metrics, checkpoints
        self._trainer, self._publisher, self._algorithm = trainer, publisher, algorithm
        self._memory, self._observer, self._find_fault = memory, observer, find_fault
        self._evaluator = evaluator or Evaluations(None, None)
        self._waits, self._scoring = waits, scoring
        self._stopping = self._draining = False
        self._phase = "starting"
        self.last_report: StepReport | None = None
        self._syncs: dict[str, SyncReport] = {}
        self._ages: dict[str, SegmentAges] = {}
        self._collector = Collector(
            pool=pool, log=log, league=league, memory=memory, observer=observer, reward_range=reward_range,
            batch=config.train.batch, max_failures=config.rollout.max_failures, waits=waits, scoring=scoring,
            starved=self._is_starved, gate=league_link.gate if league_link else None, aside=self._evaluator.take,
        )  # fmt: skip

    def stop(self) -> None:
        """Finish the step that is under way, save, and leave."""
        self._stopping = True
        self._observer.event("stopping: finishing the step under way and saving; once more to leave at once")

    async def run(self) -> str:
        """Train to the last step. Returns ``finished`` or ``interrupted``; raises `RunError`."""
        try:
            async with asyncio.TaskGroup() as group:
                background = [
                    group.create_task(t())
                    for t in (self._dispatch, self._collector.run, self._scoring.run, self._watch)
                ]
                outcome = await self._train()
                for task in background:
                    task.cancel()
        except BaseExceptionGroup as errors:
            raise _first_leaf(errors) from None
        return outcome

    # ── generation ────────────────────────────────────────────────────────────────────────────

    async def _dispatch(self) -> None:
        memory, gate = self._memory, self._league_link.gate if self._league_link else None
        while True:
            await self._waits.until("a free slot and admission of a match", self._may_start)
            if self._stopping:
                return
            if gate is not None and gate.wants():
                await self._pool.submit(gate.next_match())
                continue
            pending = memory.next_pending()
            memory.ledger.start(pending.episode_id)
            memory.began_with[pending] = dict(memory.published)
            await self._pool.submit(self._matchmaker.match(pending.index, pending.attempt))

    def _may_start(self) -> bool:
        gate = self._league_link.gate if self._league_link else None
        wanted = self._admitted() or (gate is not None and gate.wants())
        return self._stopping or (self._pool.num_free > 0 and wanted)

    def _admitted(self) -> bool:
        if self._draining:
            return False
        memory, train = self._memory, self._config.train
        counts = memory.ledger.report()
        return startable(
            steps_published=memory.published_step, depth=version_lag(self._config.buffer), batch=train.batch,
            trained=counts.trained, waiting=counts.waiting, in_flight=counts.in_flight, total_steps=train.steps,
        ) > 0  # fmt: skip

    # ── training ──────────────────────────────────────────────────────────────────────────────

    async def _train(self) -> str:
        memory, config = self._memory, self._config
        while memory.step < config.train.steps:
            self._phase = WAITING
            waited_from = time.monotonic()
            await self._waits.until(
                f"{config.train.batch} episodes to train on", lambda: self._stopping or self._may_train()
            )
            if self._stopping:
                break
            await self._step(waited_s=time.monotonic() - waited_from)
        interrupted = memory.step < config.train.steps
        if interrupted:
            await self._checkpoint()
        await self._collector.record_games()
        self._phase = "interrupted" if interrupted else "finished"
        return self._phase

    def _may_train(self) -> bool:
        memory, buffer = self._memory, self._config.buffer
        memory.discard_taken_back()
        if buffer.max_staleness is not None:
            memory.discard_stale(buffer.max_staleness)
        return may_train(
            batch=self._config.train.batch, depth=awaited_lag(buffer),
            waiting_staleness=memory.buffer.staleness(memory.versions).values(),
            in_flight_staleness=memory.in_flight_staleness(),
        )  # fmt: skip

    def _is_starved(self) -> bool:
        """Whether the loop waits for episodes that cannot come while the buffer takes none."""
        if self._memory.buffer.num_unready:
            return False  # what is being scored makes room when it is trained on
        return self._phase == DRAINING or (self._phase == WAITING and not self._may_train())

    async def _step(self, waited_s: float) -> None:
        memory, config = self._memory, self._config
        start = time.monotonic()
        entries = memory.buffer.take(config.train.batch, memory.versions)
        memory.consume([e.seq for e in entries])
        episodes = [e.episode for e in entries]
        scores = [memory.scores.pop(e.seq, ()) for e in entries]
        segments = self._segments(episodes, scores)
        staleness = [e.staleness for e in entries]
        self._ages = segment_ages(segments, memory.versions)
        self._phase = "training"
        agents = learning_now(agents_with_signal(segments), tuple(memory.versions), memory.step, config.train.alternate)
        replies = await self._train_step(agents, [s for s in segments if s.agent in agents])
        memory.step += 1
        for agent in agents:
            memory.versions[agent] = memory.next_version(agent)
        if memory.step % config.checkpoint.every == 0 or memory.step == config.train.steps:
            await self._checkpoint()
        trained_s = time.monotonic() - start
        for episode in episodes:
            memory.trained.add(episode.num_tokens()[1])
        drained_s = await self._publish(agents)
        figures = batch_figures(episodes) | {
            "staleness_mean": sum(staleness) / len(staleness), "staleness_max": max(staleness),
            "train_s": trained_s, "wait_s": waited_s, "drained_s": drained_s,
            "games_cancelled": self._collector.take_cancelled(),
            "trained_tokens_per_s": sum(r.num_tokens for r in replies) / trained_s,
        }  # fmt: skip
        await self._collector.record_games()
        self._report(figures | {"evaluation": await self._evaluate()}, replies, agents)
        await self._league_step(episodes)

    async def _league_step(self, episodes: list[Episode]) -> None:
        """Snapshots and the collapse watch; an alarm that is to stop the run stops it as a signal would."""
        if self._league_link is None:
            return
        memory = self._memory
        busy = {p.index for p in (*memory.began_with, *memory.replays)}
        orders = await self._league_link.after_step(memory.step, memory.published, episodes, busy)
        if orders.stop:
            self._observer.event(f"stopping because of the collapse watch: {orders.stop}")
            self.stop()
        if orders.roll_back:
            await self._roll_back(orders.roll_back)
        await self._waits.notify()

    async def _roll_back(self, agents: tuple[str, ...]) -> None:
        """Trainer, then checkpoint, then engines: the agents are what they were at their last good version, under new numbers."""
        link, memory = self._league_link, self._memory
        if link is None or link.good is None:
            raise RunError("the collapse watch wants a rollback, and no good versions were kept")
        parents = {}
        for agent in agents:
            good = await link.good.go_back(agent)
            memory.take_back(agent)
            link.taken_back(agent, good.version)
            parents[agent] = good.version
            self._observer.event(
                f"collapse watch: {agent} goes back to {good.version} of step {good.step} as "
                f"{PolicyVersion(agent, memory.versions[agent])}; what it played since is not trained on"
            )
        memory.discard_taken_back()
        await self._cancel([p for p in memory.began_with if self._learns_in(p, agents)])
        await self._checkpoint()
        await self._publish(agents, parents)

    def _learns_in(self, pending: PendingMatch, agents: tuple[str, ...]) -> bool:
        return any(s.trained and s.agent in agents for s in self._matchmaker.match(pending.index).seats)

    async def _evaluate(self) -> dict[str, float]:
        """Figures of the versions that are current now, where it is time for them."""
        memory, every = self._memory, self._config.eval.every
        if not every or (memory.step % every and memory.step != self._config.train.steps):
            return {}
        self._phase = "evaluating"
        found = await self._evaluator.evaluate(memory.published, memory.step)
        memory.averages = self._evaluator.totals()
        return found

    async def _publish(self, agents: tuple[str, ...], parents: Mapping[str, PolicyVersion] | None = None) -> float:
        """Make the agents' new versions current; how many seconds games under way were waited for."""
        memory, drained_s = self._memory, 0.0
        if self._config.rollout.partial == "drain" and agents:
            start, self._phase, self._draining = time.monotonic(), DRAINING, True
            await self._waits.until("games under way to end", lambda: not memory.ledger.in_flight)
            drained_s = time.monotonic() - start
        self._phase = "publishing"
        self._syncs |= await self._publisher.publish_all(
            [PolicyVersion(a, memory.versions[a]) for a in agents], parents
        )
        memory.published |= {agent: memory.versions[agent] for agent in agents}
        memory.published_step = memory.step
        self._draining = False
        if self._config.rollout.partial == "cancel_group":
            await self._cancel_old()
        await self._waits.notify()
        return drained_s

    async def _cancel_old(self) -> None:
        """Give up the games under way that are too old now, all seats together; they begin anew as the next attempt."""
        await self._cancel(self._memory.began_before(self._config.buffer.max_staleness or 0))

    async def _cancel(self, matches: list[PendingMatch]) -> None:
        for match in matches:
            await self._pool.cancel(match.episode_id)

    def _segments(self, episodes: list[Episode], scores: list[Weighted]) -> list[Segment]:
        """Episodes and what was said of them → token streams with advantages: all that the trainer sees."""
        scored = [rewarded(e, s) for e, s in zip(episodes, scores, strict=True)]
        out: list[Segment] = []
        for episode, advantages, said in zip(scored, self._algorithm.advantages(scored), scores, strict=True):
            credit = with_turn_rewards(episode, turn_credit(episode, advantages, self._config.algorithm), said)
            out += with_teachers(episode_segments(episode, credit), said)
        return out

    async def _train_step(self, agents: tuple[str, ...], segments: list[Segment]) -> list[StepDone]:
        if not agents:
            self._observer.event(f"step {self._memory.step + 1}: no agent had a signal (all advantages are 0)")
            return []
        config = self._config.train
        plan = plan_micro_batches(segments, ranks=config.ranks, max_tokens=config.micro_batch_tokens)
        return await self._trainer.step(
            step=self._memory.step, agents=agents, micro_batches=plan, num_actions=action_counts(segments, agents),
            num_sequences=sequence_counts(segments, agents), timeout_s=config.timeout_s,
        )  # fmt: skip

    async def _checkpoint(self) -> None:
        self._phase = "saving"
        with self._checkpoints.writing(self._memory.state(self._algorithm.state())) as folder:
            await self._trainer.save(str(folder / TRAINER_FOLDER), self._config.train.timeout_s)

    def _report(self, figures: dict[str, Any], replies: list[StepDone], moved: tuple[str, ...]) -> None:
        memory = self._memory
        trained = replies[0].agents if replies else {}
        done_here = memory.step - memory.first_step
        episodes_per_s, tokens_per_s = self._collector.meter.rates()
        report = StepReport(
            step=memory.step, num_steps=self._config.train.steps, elapsed_s=memory.elapsed_s,
            eta_s=memory.elapsed_here_s / done_here * (self._config.train.steps - memory.step),
            accounting=memory.ledger.check(waiting=len(memory.buffer)), buffer_episodes=len(memory.buffer), buffer_bytes=memory.buffer.num_bytes,
            scorers=self._scoring.figures(), length_generated=memory.generated.figures(), length_trained=memory.trained.figures(),
            episodes_per_s=episodes_per_s, sampled_tokens_per_s=tokens_per_s,
            agents={a: self._agent_step(a, a in moved, trained.get(a)) for a in sorted(memory.versions)},
            league=self._league_link.figures() if self._league_link else {}, pools=self._pool.who_played(),
            **figures,
        )  # fmt: skip
        self._metrics.write(report.step, flat_metrics(report))
        self.last_report = report
        self._observer.step(report)

    def _agent_step(self, agent: str, moved: bool, train: AgentReport | None) -> AgentStep:
        version = self._memory.versions[agent]
        sync, ages = self._syncs.get(agent), self._ages.get(agent, SegmentAges())
        if not moved or sync is None:
            return AgentStep(version=version, moved=False, ages=ages)
        return AgentStep(
            version=version, moved=True, ages=ages, train=train, probe_mean=sync.probe_mean, probe_max=sync.probe_max,
            policy_moved=sync.policy_moved, sync_s=sync.total_s, sync_tries=sync.tries, sync_held_s=sync.held_s,
            answers_waited_for=sync.waited_for, answers_swapped=sync.swapped, answers_resumed=sync.resumed,
            answers_left=sync.left,
        )  # fmt: skip

    # ── watching ──────────────────────────────────────────────────────────────────────────────

    async def _watch(self) -> None:
        """Children alive, and something moving; every other wait has a deadline of its own."""
        last_mark: object = None
        moved_at = time.monotonic()
        while True:
            fault = self._find_fault()
            if fault is not None:
                raise fault
            mark = (self._memory.ledger.snapshot(), self._memory.step, self._phase)
            if mark != last_mark:
                last_mark, moved_at = mark, time.monotonic()
            if self._phase in (WAITING, DRAINING) and time.monotonic() - moved_at > self._config.stall_timeout_s:
                raise StalledError(self._describe_stall(time.monotonic() - moved_at))
            self._observer.status(self._status())
            await self._waits.notify()  # a restarted worker or a signal has no other way to wake a waiting task
            await asyncio.sleep(STATUS_EVERY_S)

    def _describe_stall(self, for_s: float) -> str:
        held = ", ".join(f"{h.episode_id} at {h.worker} for {h.age_s:.0f} s" for h in self._pool.in_flight[:5])
        return (
            f"no progress for {for_s:.0f} s while {self._phase}. Waited for: {self._waits.describe()}. The buffer holds "
            f"{len(self._memory.buffer)} of {self._config.train.batch} episodes; games under way: {held or 'none'}; free "
            f"slots: {self._pool.num_free}"
        )

    def _status(self) -> Status:
        memory = self._memory
        counts = memory.ledger.report()
        return Status(
            phase=self._phase, step=memory.step, num_steps=self._config.train.steps, started=counts.started,
            stored=counts.stored, in_flight=counts.in_flight, buffer_episodes=len(memory.buffer),
            elapsed_s=memory.elapsed_s, versions=dict(memory.versions),
        )  # fmt: skip


def _first_leaf(errors: BaseExceptionGroup[BaseException]) -> BaseException:
    """The first error itself: one cause is shown, not a tree of them."""
    error: BaseException = errors
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
