"""A training run with an engine and a trainer of set speed: everything else of a run is the real thing.

In: settings of a run, how many seconds a training step takes. Out: the reports of its steps. The engine is the policy
server's own without a model (real process, real messages), the workers are real, the trainer waits instead of computing.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

import zmq.asyncio

from selfplay.agent import Sampling
from selfplay.buffer import EpisodeBuffer
from selfplay.config import Config, check_config
from selfplay.config.derive import version_lag
from selfplay.controller.controller import Controller
from selfplay.controller.memory import Memory
from selfplay.controller.policy_link import PolicyLink
from selfplay.controller.publisher import Manner, Publisher
from selfplay.controller.report import Status, StepReport
from selfplay.controller.scoring_stage import ScoringStage
from selfplay.controller.trainer_link import TrainerLink
from selfplay.controller.waits import Waits
from selfplay.launch.children import RunChildren
from selfplay.launch.launchers import LocalLauncher
from selfplay.league import LeagueRecords, Matchmaker
from selfplay.policy import PolicyServerConfig
from selfplay.pool import PoolConfig, PoolSupervisor
from selfplay.process import RuntimeDir
from selfplay.registry import describe
from selfplay.scoring import Panel, load_algorithm
from selfplay.store.adapters import AdapterStore
from selfplay.store.checkpoints import Checkpoints
from selfplay.store.episode_log import EpisodeLog
from selfplay.store.metrics import MetricsLog
from selfplay.store.state import RunState
from selfplay.types import PolicyVersion
from selfplay.wire.messages import AgentReport, BucketHeader, Exported, Sent, StepDone

HEADER = BucketHeader(
    transport="shm", address="none", offset=0, num_bytes=4, crc32=0, dtype="float32", layout=(("x", (1,), 0),),
    adapter_config={},
)  # fmt: skip
READY_S = 60.0
TOKENS = 9
"""That the engine without a model samples per answer."""


class WaitingTrainer:
    """`TrainerLink` without ranks: a step takes ``step_s`` seconds, everything else no time."""

    is_lost = False

    def __init__(self, step_s: float) -> None:
        self._step_s = step_s

    async def step(self, *, step: int, agents: Sequence[str], num_actions: dict[str, int], **_: Any) -> list[StepDone]:
        await asyncio.sleep(self._step_s)
        report = AgentReport(
            moved=True, loss=0, grad_norm=0, lr=0, kl=0, mean_abs_dlogp=0, max_abs_dlogp=0, clip_fraction=0, mask_fraction=0, ess=1, entropy=0,
            reference_kl=0,
            num_actions=0,
        )  # fmt: skip
        done = StepDone(
            request=0, rank=0, step=step, agents=dict.fromkeys(agents, report), num_tokens=sum(num_actions.values()),
            duration_s=self._step_s,
        )  # fmt: skip
        return [done]

    async def probe(self, agent: str, ids: tuple[int, ...], timeout_s: float) -> tuple[float, ...]:  # noqa: ARG002
        """What the engine without a model answers."""
        return tuple(-math.log(2 + (a * 31 + b) % 7) for a, b in itertools.pairwise(ids))

    async def export(self, make: Callable[[int], Any], timeout_s: float) -> Exported:  # noqa: ARG002
        return Exported(request=0, header=HEADER)

    async def send(self, make: Callable[[int], Any], timeout_s: float) -> Sent:  # noqa: ARG002
        return Sent(request=0, digest="none")

    async def save(self, folder: str, timeout_s: float) -> None:  # noqa: ARG002
        await asyncio.to_thread(Path(folder).mkdir, parents=True, exist_ok=True)


class Recorder:
    """`Observer` that keeps the reports."""

    def __init__(self) -> None:
        self.steps: list[StepReport] = []

    def event(self, text: str) -> None: ...

    def status(self, status: Status) -> None: ...

    def step(self, report: StepReport) -> None:
        self.steps.append(report)


async def run_at_speed(config: Config, place: Path, *, step_s: float, tokens_per_s: float) -> list[StepReport]:
    """Train ``config`` in the folder ``place`` with a step of ``step_s`` seconds and so many tokens per second and request."""
    check_config(config)
    runtime, context = RuntimeDir.create(), zmq.asyncio.Context()
    try:
        async with contextlib.AsyncExitStack() as stack:
            return await _run(config, place, runtime, context, stack, WaitingTrainer(step_s), tokens_per_s)
    finally:
        context.destroy(linger=0)
        runtime.remove()


async def _run(
    config: Config,
    place: Path,
    runtime: RuntimeDir,
    context: zmq.asyncio.Context,
    stack: contextlib.AsyncExitStack,
    trainer: WaitingTrainer,
    tokens_per_s: float,
) -> list[StepReport]:
    spec = describe(config.env, dict(config.env_params))
    matchmaker = Matchmaker(spec, config, known_players=("llm",))
    agents, recorder, waits = matchmaker.trained_agents, Recorder(), Waits()
    log = stack.enter_context(EpisodeLog.open(place / "episodes", write=True, say=recorder.event))
    league = stack.enter_context(LeagueRecords.open(place / "league.sqlite"))
    metrics = stack.enter_context(MetricsLog.open(place / "metrics.jsonl", None, say=recorder.event, resume_step=None))
    memory = Memory(
        state=RunState(step=0, versions=dict.fromkeys(agents, 0)), log=log, store=AdapterStore(place / "adapters"),
        buffer=EpisodeBuffer(max_episodes=config.buffer.max_episodes, max_bytes=config.buffer.max_bytes),
    )  # fmt: skip
    link = PolicyLink(context, runtime.endpoint("policy.sock"))
    stack.push_async_callback(link.close)
    children = RunChildren(place / "logs", LocalLauncher())
    stack.push_async_callback(children.close)
    children.start_policy(
        PolicyServerConfig(
            address=runtime.endpoint("policy.sock"), runtime_dir=str(runtime.path), model="none", engine="fake",
            max_live_adapters=len(agents) * (version_lag(config.buffer) + 2), max_model_len=8192,
            fake_tokens_per_s=tokens_per_s,
        ),
        link,
    )  # fmt: skip
    children.watch()
    pool = PoolSupervisor(_pool(config, runtime), runtime=runtime, log_dir=place / "logs", say=recorder.event)
    stack.push_async_callback(pool.close, 5.0)
    _, info = await asyncio.gather(pool.start(), link.ready(READY_S))
    publisher = Publisher(
        trainer=cast(TrainerLink, trainer), engines=[link], transport="shm", address="none", adapters=place / "adapters",
        probe_ids=info.probe_ids, probe_bound=1e-6, timeout_s=config.sync.timeout_s,
        keep=version_lag(config.buffer) + 1, manner=Manner.of(config),
    )  # fmt: skip
    await publisher.publish_all([PolicyVersion(agent, 0) for agent in agents])
    controller = Controller(
        config=config, log=log, metrics=metrics, matchmaker=matchmaker, pool=pool, publisher=publisher, league=league,
        checkpoints=Checkpoints(place / "checkpoints", keep=1, say=recorder.event), trainer=cast(TrainerLink, trainer),
        algorithm=load_algorithm(config.algorithm), memory=memory, observer=recorder, reward_range=spec.reward_range,
        find_fault=children.fault, waits=waits,
        scoring=ScoringStage(Panel({}), {}, memory=memory, waits=waits, log=None, say=recorder.event, max_failures=1),
    )  # fmt: skip
    await controller.run()
    return recorder.steps


def _pool(config: Config, runtime: RuntimeDir) -> PoolConfig:
    return PoolConfig(
        workers=config.rollout.workers, concurrency=config.rollout.concurrency,
        policy_endpoints=(runtime.endpoint("policy.sock"),), sampling=Sampling(max_tokens=TOKENS),
        request_timeout_s=config.rollout.request_timeout_s,
    )  # fmt: skip
