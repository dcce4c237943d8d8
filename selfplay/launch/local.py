"""A run's processes around one controller: started, tied together, and gone when it ends.

plan (checked, nothing started) ─► run folder ─► policy server, trainer ranks, environment workers ─► Controller
                                                                                          │
summary ◄─ manifest ◄─ children stopped, runtime folder removed ◄─────────────────────────┘
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import AsyncIterator, Callable
from functools import partial

import zmq.asyncio

from selfplay.agent import Sampling
from selfplay.buffer import EpisodeBuffer
from selfplay.config.derive import version_lag
from selfplay.controller.anchors import AnchorGames
from selfplay.controller.controller import TRAINER_FOLDER, Controller
from selfplay.controller.evaluator import Evaluations, Evaluator
from selfplay.controller.gate_log import GateLog
from selfplay.controller.gate_stage import GateStage
from selfplay.controller.good_versions import GoodVersions
from selfplay.controller.league_link import LeagueLink
from selfplay.controller.memory import Memory
from selfplay.controller.policy_link import PolicyLink
from selfplay.controller.publisher import Manner, Publisher
from selfplay.controller.report import Observer, RunSummary, StepReport
from selfplay.controller.scoring_stage import ScoringStage, ServedModels
from selfplay.controller.trainer_link import TrainerLink
from selfplay.controller.waits import Waits
from selfplay.errors import ConfigError, RunError, StoreError
from selfplay.launch.children import RunChildren
from selfplay.launch.launchers import open_launcher, worker_launch
from selfplay.launch.plan import PROBE_BOUND, RunPlan, gate_spec
from selfplay.launch.remote import open_gateway
from selfplay.launch.serving import judge_socket, policy_socket, server_config
from selfplay.league import LeagueRecords
from selfplay.league.gate import Gate
from selfplay.league.league import League
from selfplay.league.pool import SnapshotPool
from selfplay.pool import PoolConfig, PoolSupervisor
from selfplay.process import RuntimeDir
from selfplay.store.adapters import AdapterStore
from selfplay.store.checkpoints import Checkpoint, Checkpoints
from selfplay.store.episode_log import EpisodeLog
from selfplay.store.metrics import MetricsLog
from selfplay.store.run_folder import RunFolder
from selfplay.store.score_log import ScoreLog
from selfplay.store.state import RunState
from selfplay.training.config import RankConfig
from selfplay.types import PolicyVersion
from selfplay.wire.messages import PolicyInfo, Terms

POOL_GRACE_S = 5.0
TRAINER_START_TIMEOUT_S = 300.0
TRAINER_SOCKET = "trainer.sock"


class Session:
    """One process's work on a run, from its last checkpoint (or nothing) to its end."""

    def __init__(self, plan: RunPlan, run: RunFolder, checkpoint: Checkpoint | None, observer: Observer) -> None:
        self._plan, self._run, self._checkpoint, self._observer = plan, run, checkpoint, observer
        self._state = checkpoint.state if checkpoint else RunState(step=0, versions=dict.fromkeys(plan.agents, 0))
        self._store = AdapterStore(run.adapters)
        self._address = ""

    async def run(self) -> RunSummary:
        """Train; raises `RunError` for a fault. Everything started here is gone when it returns or raises."""
        runtime = RuntimeDir.create()
        context = zmq.asyncio.Context()
        try:
            async with contextlib.AsyncExitStack() as stack:
                return await self._run_in(runtime, context, stack)
        finally:
            context.destroy(linger=0)
            runtime.remove()

    async def _run_in(
        self, runtime: RuntimeDir, context: zmq.asyncio.Context, stack: contextlib.AsyncExitStack
    ) -> RunSummary:
        plan, config, say = self._plan, self._plan.config, self._observer.event
        log = stack.enter_context(EpisodeLog.open(self._run.episodes, write=True, say=say, known=self._state.logged))
        league = stack.enter_context(self._league())
        league.add(episode for _, episode in log.episodes())
        metrics = stack.enter_context(
            MetricsLog.open(
                self._run.metrics_path, self._run.tensorboard, say=say,
                resume_step=self._state.step if self._run.manifest().resumes else None,
            )
        )  # fmt: skip
        buffer = EpisodeBuffer(max_episodes=config.buffer.max_episodes, max_bytes=config.buffer.max_bytes)
        memory = Memory(state=self._state, buffer=buffer, log=log, store=self._store, scored=bool(plan.panel.scorers))
        if memory.num_restored:
            say(f"{memory.num_restored} episodes wait in the buffer, {len(memory.replays)} matches are played again")
        if self._state.algorithm:
            plan.algorithm.load_state(self._state.algorithm)

        policies = [PolicyLink(context, runtime.endpoint(policy_socket(i))) for i in range(config.policy.engines)]
        for policy in policies:
            stack.push_async_callback(policy.close)
        trainer = TrainerLink(context, runtime.endpoint(TRAINER_SOCKET), config.train.ranks)
        stack.push_async_callback(trainer.close)
        num_servers = len(policies) + len(plan.judges)
        launcher = stack.enter_context(open_launcher(config, device=plan.serving.device, num_engines=num_servers))
        children = RunChildren(self._run.logs, launcher)
        stack.push_async_callback(children.close)
        pool = PoolSupervisor(
            self._pool_config(runtime), runtime=runtime, log_dir=self._run.logs, say=self._observer.event,
            launch=partial(worker_launch, launcher),
        )  # fmt: skip

        find_fault = self._open_to_remote_pools(stack, runtime, pool, children)
        for i, policy in enumerate(policies):
            children.start_policy(server_config(plan.serving, config, runtime, slots=plan.slots, engine=i), policy)
        judges = self._start_judges(runtime, context, stack, children)
        for rank in range(config.train.ranks):
            children.start_rank(self._rank_config(runtime, rank), trainer)
        children.watch()
        stack.push_async_callback(pool.close, POOL_GRACE_S)
        info = await self._start(pool, policies, trainer)

        await self._check_judges(judges, info)
        publisher = self._publisher(runtime, trainer, policies, info)
        await self._publish_start(publisher, policies)
        waits = Waits()
        link = await self._link_league(stack, league, policies, trainer, memory)
        controller = Controller(
            config=config, log=log, metrics=metrics,
            checkpoints=Checkpoints(self._run.checkpoints, keep=config.checkpoint.keep, say=say),
            matchmaker=link.league, league_link=link, pool=pool, trainer=trainer, publisher=publisher, league=league,
            algorithm=plan.algorithm, memory=memory, observer=self._observer,
            reward_range=plan.spec.reward_range, find_fault=find_fault, waits=waits,
            scoring=self._scoring(stack, memory, waits, policies, judges),
            evaluator=Evaluations(self._evaluator(policies[0]), self._anchors(pool, waits)),
        )  # fmt: skip
        async with _stopped_by_signals(controller):
            outcome = await controller.run()
        return self._summary(outcome, memory, info, controller.last_report)

    def _evaluator(self, policy: PolicyLink) -> Evaluator | None:
        plan = self._plan
        if plan.tree is None:
            return None
        return Evaluator(
            plan.tree, plan.matchmaker.match(0).seats, policy, timeout_s=plan.config.rollout.request_timeout_s,
            totals=self._state.averages,
        )  # fmt: skip

    def _anchors(self, pool: PoolSupervisor, waits: Waits) -> AnchorGames | None:
        config = self._plan.config
        if not (config.eval.every and config.eval.anchors):
            return None
        return AnchorGames(
            self._plan.matchmaker, config.eval.anchors, games=config.eval.games, seed=config.seed, pool=pool, waits=waits,
            say=self._observer.event,
        )  # fmt: skip

    # ── scorers ───────────────────────────────────────────────────────────────────────────────

    def _start_judges(
        self, runtime: RuntimeDir, context: zmq.asyncio.Context, stack: contextlib.AsyncExitStack, children: RunChildren
    ) -> dict[str, PolicyLink]:
        """A policy server for each scorer that asks another model."""
        links = {}
        for name, serving in self._plan.judges.items():
            links[name] = PolicyLink(context, runtime.endpoint(judge_socket(name)))
            stack.push_async_callback(links[name].close)
            config = server_config(serving, self._plan.config, runtime, slots=1, socket=judge_socket(name))
            children.start_policy(config, links[name])
        return links

    async def _check_judges(self, judges: dict[str, PolicyLink], info: PolicyInfo) -> None:
        """A teacher of another model reads the policy's token ids: both must have the same tokenizer."""
        for name, link in judges.items():
            theirs = await link.ready(self._plan.config.policy.start_timeout_s)
            if self._plan.panel.is_teacher(name) and theirs.probe_ids != info.probe_ids:
                raise ConfigError(
                    f"scorers.{name}.model={self._plan.judges[name].model.name} has another tokenizer than "
                    f"{self._plan.serving.model.name}: a teacher must read the same token ids"
                )

    def _scoring(
        self,
        stack: contextlib.AsyncExitStack,
        memory: Memory,
        waits: Waits,
        policies: list[PolicyLink],
        judges: dict[str, PolicyLink],
    ) -> ScoringStage:
        config, say, log = self._plan.config, self._observer.event, None
        if config.scorers:
            log = stack.enter_context(ScoreLog.open(self._run.scores, write=True, say=say))
        contexts = {
            name: ServedModels([judges[name]] if name in judges else policies, memory.published, scorer.timeout_s)
            for name, scorer in config.scorers.items()
        }
        return ScoringStage(
            self._plan.panel, contexts, memory=memory, waits=waits, log=log, say=say,
            max_failures=config.rollout.max_failures,
        )  # fmt: skip

    def _league(self) -> LeagueRecords:
        try:
            return LeagueRecords.open(self._run.league_path)
        except StoreError as error:
            raise StoreError(f"{error}; remove the file, it is made again from the episode log") from error

    async def _link_league(
        self,
        stack: contextlib.AsyncExitStack,
        records: LeagueRecords,
        policies: list[PolicyLink],
        trainer: TrainerLink,
        memory: Memory,
    ) -> LeagueLink:
        """Opponents by rule, and the snapshots they are drawn from, as far as the run had come."""
        plan, config = self._plan, self._plan.config
        snapshots = SnapshotPool(self._run.league_path)
        stack.callback(snapshots.close)
        league = League(plan.matchmaker, config.league, snapshots, records, seed=config.seed)
        gate = good = None
        if config.league.gate:
            slots = config.rollout.workers * config.rollout.concurrency
            most = max(1, int(config.league.gate_share * slots))
            tests = Gate(plan.matchmaker, config.league, snapshots, seed=config.seed, most=most)
            log = GateLog(self._run.gate, gate_spec(plan), self._store, tests.read, self._observer.event)
            stack.callback(log.close)
            gate = GateStage(tests, league, records, log, self._observer.event)
        if config.league.on_alarm == "rollback":
            good = GoodVersions(self._run.good, snapshots, trainer, plan.algorithm, config.train.timeout_s)
        link = LeagueLink(
            league, snapshots, config.league, self._store, policies, agents=plan.agents,
            timeout_s=config.sync.timeout_s, say=self._observer.event, gate=gate, good=good,
        )  # fmt: skip
        await link.start(memory.step, memory.published)
        return link

    # ── starting ──────────────────────────────────────────────────────────────────────────────

    async def _start(self, pool: PoolSupervisor, policies: list[PolicyLink], trainer: TrainerLink) -> PolicyInfo:
        plan, say = self._plan, self._observer.event
        say(
            f"starting {plan.config.policy.engines} × {plan.serving.engine} on {plan.serving.device} in {plan.serving.dtype} with {plan.slots} adapter slots, "
            f"{plan.config.train.ranks} trainer rank(s), {plan.config.rollout.workers} environment worker(s); "
            f"deepest version lag {version_lag(plan.config.buffer)} (buffer.depth={plan.config.buffer.depth}), new versions at "
            f"{plan.config.sync.interrupt}, partial play: {plan.config.rollout.partial}"
        )
        serving = [asyncio.create_task(p.ready(plan.config.policy.start_timeout_s)) for p in policies]
        starts = [
            asyncio.create_task(pool.start()),
            asyncio.create_task(trainer.ready(TRAINER_START_TIMEOUT_S)),
            *serving,
        ]
        try:
            await asyncio.gather(*starts)
        finally:
            for start in starts:
                start.cancel()
            await asyncio.gather(*starts, return_exceptions=True)
        info = serving[0].result()
        say(
            f"{info.engine} serves {plan.serving.model.name} on {plan.serving.device}; adapters travel by {plan.transport}"
        )
        self._run.update_manifest(engine=info.engine)
        return info

    def _publisher(
        self, runtime: RuntimeDir, trainer: TrainerLink, policies: list[PolicyLink], info: PolicyInfo
    ) -> Publisher:
        config = self._plan.config
        bound = config.sync.probe_mean or max(
            PROBE_BOUND[self._plan.serving.dtype], PROBE_BOUND[self._plan.train_dtype]
        )
        return Publisher(
            trainer=trainer, engines=policies, transport=self._plan.transport, address=self._weights_address(runtime),
            adapters=self._run.adapters, probe_ids=info.probe_ids, probe_bound=bound, timeout_s=config.sync.timeout_s,
            keep=version_lag(config.buffer) + 1, manner=Manner.of(config), retries=config.sync.retries,
            say=self._observer.event,
        )  # fmt: skip

    def _weights_address(self, runtime: RuntimeDir) -> str:
        if self._plan.transport in ("gloo", "nccl"):
            return f"file://{runtime.file('weights')}"
        return str(runtime.path if self._plan.transport == "shm" else self._run.path / "weights")

    async def _publish_start(self, publisher: Publisher, policies: list[PolicyLink]) -> None:
        """Put every agent's present version on the engines, the same way as every later one, and the frozen ones."""
        await publisher.join()
        for version in self._plan.frozen:
            for policy in policies:
                await policy.begin_install(
                    version, self._store.bucket_header(version), self._plan.config.sync.timeout_s
                )
                await policy.commit_install(version, self._plan.config.sync.timeout_s)
        for agent in self._plan.agents:
            report = await publisher.publish(PolicyVersion(agent, self._state.versions[agent]))
            self._observer.event(
                f"{report.version} is current: {report.num_bytes / 1e6:.1f} MB by {self._plan.transport} in "
                f"{report.total_s:.2f} s (export {report.export_s:.2f}, move {report.move_s:.2f}), probe mean |Δlogp| {report.probe_mean:.5f} (max {report.probe_max:.4f})"
            )

    # ── what each process is told ─────────────────────────────────────────────────────────────

    def _open_to_remote_pools(
        self, stack: contextlib.AsyncExitStack, runtime: RuntimeDir, pool: PoolSupervisor, children: RunChildren
    ) -> Callable[[], RunError | None]:
        """Listen for remote pools where the config says so; what tells of a fault of any process or of the listener."""
        config, plan = self._pool_config(runtime), self._plan
        if not plan.config.remote.listen:
            return children.fault
        terms = Terms(
            sampling=config.sampling, jury=config.jury.agent, episode_timeout_s=config.episode_timeout_s,
            request_timeout_s=config.request_timeout_s, silence_s=plan.config.remote.silence_s,
        )  # fmt: skip
        gateway = open_gateway(
            plan.config, plan.spec, terms, run=self._run.path, pool=pool, engines=list(config.policy_endpoints),
            say=self._observer.event,
        )  # fmt: skip
        stack.push_async_callback(gateway.close)
        return lambda: children.fault() or gateway.fault()

    def _rank_config(self, runtime: RuntimeDir, rank: int) -> RankConfig:
        plan = self._plan
        return RankConfig(
            model=str(plan.serving.model.path), config=plan.config, dtype=plan.train_dtype, bucket_dtype=plan.serving.dtype, rank=rank,
            world_size=plan.config.train.ranks, controller=runtime.endpoint(TRAINER_SOCKET),
            runtime_dir=str(runtime.path), adapters=str(self._run.adapters), agents=plan.agents,
            versions=self._state.versions,
            checkpoint=str(self._checkpoint.folder / TRAINER_FOLDER) if self._checkpoint else "", device=plan.serving.device,
        )  # fmt: skip

    def _pool_config(self, runtime: RuntimeDir) -> PoolConfig:
        config, rollout = self._plan.config, self._plan.config.rollout
        api_seats = any(s.player == "api" for s in self._plan.matchmaker.match(0).seats)
        return PoolConfig(
            workers=rollout.workers, concurrency=rollout.concurrency, max_restarts=rollout.max_restarts,
            policy_endpoints=tuple(runtime.endpoint(policy_socket(i)) for i in range(config.policy.engines)), jury=config.jury,
            sampling=Sampling(
                temperature=rollout.temperature, top_k=rollout.top_k, top_p=rollout.top_p,
                max_tokens=self._plan.max_move_tokens,
            ),
            episode_timeout_s=rollout.episode_timeout_s, request_timeout_s=rollout.request_timeout_s,
            needs_api_key=api_seats or config.jury.agent == "api",
        )  # fmt: skip

    def _summary(self, outcome: str, memory: Memory, info: PolicyInfo, last: StepReport | None) -> RunSummary:
        newest = {a: PolicyVersion(a, v) for a, v in memory.published.items()}
        return RunSummary(
            run=str(self._run.path), outcome=outcome, step=memory.step, elapsed_s=memory.elapsed_s, engine=info.engine,
            transport=self._plan.transport, accounting=memory.ledger.check(waiting=len(memory.buffer)),
            versions={a: (self._state.versions[a], v.version) for a, v in newest.items()}, last=last,
            adapters={a: str(self._store.path(v)) for a, v in newest.items()},
        )  # fmt: skip


@contextlib.asynccontextmanager
async def _stopped_by_signals(controller: Controller) -> AsyncIterator[None]:
    """Ctrl-C or SIGTERM once: finish the step and save. Once more: leave at once."""
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    asked = False

    def on_signal() -> None:
        nonlocal asked
        if asked and task is not None:
            task.cancel()
        elif not asked:
            asked = True
            controller.stop()

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, on_signal)
    try:
        yield
    finally:
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(number)
