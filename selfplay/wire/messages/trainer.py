"""Controller ⇄ trainer rank: steps, probes, checkpoints, and the way of a version out of the trainer."""

from __future__ import annotations

from typing import Literal

import msgspec

from selfplay.types import PolicyVersion, Segment
from selfplay.wire.messages.base import BucketHeader, JoinWeights, RequestId, Text, WireMessage


class TrainerHello(WireMessage, frozen=True, kw_only=True, tag="hello"):
    """First message of a rank: it is up, joined, and its adapters are as ``versions`` say."""

    protocol: int
    rank: int
    pid: int
    step: int
    versions: dict[str, int]


class TrainStep(WireMessage, frozen=True, kw_only=True, tag="step"):
    """Controller → every rank: one optimizer step.

    ``agents`` is the globally agreed, sorted list: every rank runs the same collectives for it, with empty segments for
    the absent. ``micro_batches`` has the same length on every rank. ``num_actions`` and ``num_sequences`` are the
    normalisers, over *all* ranks. An agent missing from ``agents`` had no signal and is not touched at all.
    """

    request: RequestId
    step: int
    agents: tuple[str, ...]
    micro_batches: tuple[tuple[Segment, ...], ...]
    num_actions: dict[str, int]
    num_sequences: dict[str, int]


class AgentReport(msgspec.Struct, frozen=True, kw_only=True):
    """What one step did to one agent; all figures over all ranks."""

    moved: bool
    loss: float
    grad_norm: float
    lr: float
    kl: float
    """k3 estimate of KL(rollout ‖ trainer) on the step's action tokens, before the update."""
    mean_abs_dlogp: float
    max_abs_dlogp: float
    clip_fraction: float
    """Tokens whose ratio was clipped or whose correction was capped, in the last epoch."""
    mask_fraction: float
    """Tokens left out by rule, in the last epoch."""
    ess: float
    """Effective sample size of the importance weights, as a share of the tokens."""
    entropy: float
    reference_kl: float
    """KL to the reference over the whole vocabulary; 0 where algorithm.kl is 0."""
    num_actions: int


class StepDone(WireMessage, frozen=True, kw_only=True, tag="stepped"):
    request: RequestId
    rank: int
    step: int
    agents: dict[str, AgentReport]
    num_tokens: int
    duration_s: float


class Export(WireMessage, frozen=True, kw_only=True, tag="export"):
    """Controller → rank 0: gather the adapter into a bucket for ``transport``, and begin to write it to ``folder``."""

    request: RequestId
    version: PolicyVersion
    folder: str
    transport: Literal["nccl", "gloo", "shm", "file"]
    address: str
    parent: PolicyVersion | None = None
    """The version it comes from; None: the one before it."""


class Exported(WireMessage, frozen=True, kw_only=True, tag="exported"):
    request: RequestId
    header: BucketHeader


class Send(WireMessage, frozen=True, kw_only=True, tag="send"):
    """Controller → rank 0: send the exported bucket now (the receivers are waiting)."""

    request: RequestId
    version: PolicyVersion
    timeout_s: float


class Sent(WireMessage, frozen=True, kw_only=True, tag="sent"):
    """Rank 0: the bucket is sent and the version is durable in the store, with this digest."""

    request: RequestId
    digest: str


class TrainerProbe(WireMessage, frozen=True, kw_only=True, tag="probe"):
    request: RequestId
    agent: str
    ids: tuple[int, ...]


class Save(WireMessage, frozen=True, kw_only=True, tag="save"):
    """Controller → every rank: save the training state, or that of one ``agent``, into ``folder`` (a collective)."""

    request: RequestId
    folder: str
    agent: str = ""


class Restore(WireMessage, frozen=True, kw_only=True, tag="restore"):
    """Controller → every rank: take ``agent`` back to what `Save` wrote of it: weights, moments, step counts, reference."""

    request: RequestId
    folder: str
    agent: str


class Stop(WireMessage, frozen=True, kw_only=True, tag="stop"):
    request: RequestId


class TrainerDone(WireMessage, frozen=True, kw_only=True, tag="ok"):
    request: RequestId
    rank: int
    values: dict[str, float] = msgspec.field(default_factory=dict)


class TrainerProbed(WireMessage, frozen=True, kw_only=True, tag="probed"):
    """Every rank answers a probe; rank 0 with the values, the others with none."""

    request: RequestId
    rank: int
    logprobs: tuple[float, ...]


class TrainerRefused(WireMessage, frozen=True, kw_only=True, tag="refused"):
    """The request could not be done and nothing has changed; the rank goes on."""

    request: RequestId
    rank: int
    message: Text


class TrainerFailed(WireMessage, frozen=True, kw_only=True, tag="failed"):
    """A rank cannot go on; the full traceback is in its log file."""

    request: RequestId
    rank: int
    message: Text


ToTrainer = TrainStep | Export | Send | TrainerProbe | Save | Restore | JoinWeights | Stop
FromTrainer = TrainerHello | StepDone | Exported | Sent | TrainerDone | TrainerProbed | TrainerRefused | TrainerFailed
