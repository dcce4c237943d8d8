"""One trainer rank as an object: what it becomes at start, and its answer to each message of the controller.

    RankConfig ─► process group ─► base + adapters (fresh, from the store, or from a checkpoint) ─► answers

A collective message (`TrainStep`, `Save`, `Restore`, `TrainerProbe`) must reach every rank; `Export`, `JoinWeights` and `Send` are
for rank 0 alone.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any, NoReturn

import torch

from selfplay.config import agent_lora
from selfplay.errors import TrainerError
from selfplay.store.adapters import AdapterStore
from selfplay.training import checkpoint
from selfplay.training.config import RankConfig
from selfplay.training.export import Exporter, load_version
from selfplay.training.group import RankGroup
from selfplay.training.model import Adapters, load_policy
from selfplay.training.sharding import shard_base, shards_base
from selfplay.training.trainer import Trainer
from selfplay.types import PolicyVersion
from selfplay.wire.messages import (
    Export,
    Exported,
    JoinWeights,
    Restore,
    Save,
    Send,
    Sent,
    StepDone,
    Stop,
    TrainerDone,
    TrainerProbe,
    TrainerProbed,
    TrainStep,
)

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
Reply = StepDone | Exported | Sent | TrainerDone | TrainerProbed


class TrainerService:
    """A ready rank."""

    def __init__(self, trainer: Trainer, exporter: Exporter, *, sharded: bool) -> None:
        self._trainer, self._exporter, self._sharded = trainer, exporter, sharded
        self._rank = trainer.group.rank

    @classmethod
    def start(cls, config: RankConfig) -> TrainerService:
        """Load, shard and restore; blocks until all ranks are there. Raises `TrainerError` or `ConfigError`."""
        torch.set_num_threads(config.config.train.threads)
        trainer, sharded = start_trainer(config)
        return cls(trainer, Exporter(trainer.policy, config.bucket_dtype), sharded=sharded)

    @property
    def num_steps(self) -> int:
        """Optimizer steps done over all starts of the run."""
        return self._trainer.num_steps

    def handle(self, message: Any) -> Reply:
        """Do what one message asks and return the answer."""
        match message:
            case TrainStep():
                return self._step(message)
            case TrainerProbe():
                return self._probe(message)
            case Save():
                checkpoint.save(self._trainer, Path(message.folder), message.agent)
            case Restore():
                checkpoint.load(self._trainer, Path(message.folder), message.agent)
            case Export():
                return self._rank_0("export").export(message)
            case JoinWeights():
                self._rank_0("join").join(message)
            case Send():
                return self._rank_0("send").send(message)
            case Stop():
                self.close()
            case _:
                _unknown(message)
        return TrainerDone(request=message.request, rank=self._rank)

    def close(self) -> None:
        """Leave all groups; idempotent."""
        self._exporter.close()
        self._trainer.group.close()

    def _step(self, message: TrainStep) -> StepDone:
        start = time.monotonic()
        reports = self._trainer.step(message)
        return StepDone(
            request=message.request, rank=self._rank, step=message.step, agents=reports,
            num_tokens=sum(len(s.ids) for micro in message.micro_batches for s in micro),
            duration_s=time.monotonic() - start,
        )  # fmt: skip

    def _probe(self, message: TrainerProbe) -> TrainerProbed:
        """Rank 0 answers with values; the others only take part where the base is sharded over them."""
        needed = self._rank == 0 or self._sharded
        logprobs = self._trainer.policy.probe(message.agent, message.ids) if needed else []
        return TrainerProbed(
            request=message.request, rank=self._rank, logprobs=tuple(logprobs) if self._rank == 0 else ()
        )

    def _rank_0(self, what: str) -> Exporter:
        if self._rank != 0:
            raise TrainerError(f"{what} is for rank 0, this is rank {self._rank}")
        return self._exporter


def start_trainer(config: RankConfig) -> tuple[Trainer, bool]:
    """The rank's trainer, restored as ``config`` says, and whether its base is sharded."""
    train, device = config.config.train, _device(config)
    sharded = shards_base(train.shard, device=device, world_size=config.world_size)
    policy = load_policy(
        config.model,
        dtype=DTYPES[config.dtype],
        adapters=_adapters(config),
        seed=config.config.seed,
    )
    if train.activation_checkpointing:
        policy.recompute_activations()
    group = RankGroup(config.rank, config.world_size, device)
    if sharded or config.world_size > 1:
        group = RankGroup.join(
            rank=config.rank, world_size=config.world_size, device=device, runtime=Path(config.runtime_dir),
            timeout_s=train.timeout_s,
        )  # fmt: skip
    for adapter in policy.adapters.values():
        adapter.to(device)
    if sharded:
        shard_base(policy, device=device, world_size=config.world_size)
    trainer = Trainer(policy.to(device), config.config, group)
    _restore(trainer, config)
    return trainer, sharded


def _adapters(config: RankConfig) -> Adapters:
    if config.config.train.parameters == "full":
        return dict.fromkeys(config.agents, None)
    return {agent: agent_lora(config.config, agent) for agent in config.agents}


def _restore(trainer: Trainer, config: RankConfig) -> None:
    """From a checkpoint; else each agent from its stored version. Version 0 that was never stored starts fresh."""
    if config.checkpoint:
        checkpoint.load(trainer, Path(config.checkpoint))
        return
    store = AdapterStore(Path(config.adapters))
    for agent, number in sorted(config.versions.items()):
        found = load_version(trainer.policy, store, PolicyVersion(agent, number))
        if not found and number != 0:
            raise TrainerError(f"cannot start from {agent}@{number}: it is not in {store.root}")


def _device(config: RankConfig) -> torch.device:
    if config.device == "cpu":
        return torch.device("cpu")
    found = torch.cuda.device_count()
    if found < config.world_size:
        raise TrainerError(f"train.ranks={config.world_size} needs as many GPUs, torch sees {found}")
    device = torch.device("cuda", config.rank)
    torch.cuda.set_device(device)
    return device


def _unknown(message: object) -> NoReturn:
    raise TrainerError(f"a trainer rank does not answer {type(message).__name__}")
