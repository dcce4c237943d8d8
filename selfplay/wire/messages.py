"""Every message that crosses a process border, by conversation.

    controller ⇄ environment worker     `FromWorker` / `ToWorker`
    worker or controller ⇄ policy server  `ToPolicy` / `FromPolicy`
    controller ⇄ trainer rank            `ToTrainer` / `FromTrainer`

All are tagged, array-encoded structs: no field names on the wire, no duplicate keys, unknown tags refused. Both sides
say `PROTOCOL` in their hello; another number is refused with both numbers in the message.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from selfplay.agent import Answer, Message, Sampling
from selfplay.environment import JuryQuestion
from selfplay.types import Match, PolicyVersion, Segment
from selfplay.types.match import Scalar

PROTOCOL = 1

Text = Annotated[str, Meta(max_length=20_000)]
Pin = Literal["turn", "episode"] | int
RequestId = Annotated[int, Meta(ge=0, le=2**63 - 1)]


class _Message(msgspec.Struct, frozen=True, kw_only=True, array_like=True, tag=True):
    pass


# ── controller ⇄ environment worker ──────────────────────────────────────────────────────────────


class WorkerHello(_Message, frozen=True, kw_only=True, tag="hello"):
    """First message of a worker process; ``worker`` is unique per process start."""

    protocol: int
    worker: str
    pid: int


class PlayMatch(_Message, frozen=True, kw_only=True, tag="play"):
    """Controller → worker: play this match. The lease ends with `EpisodeDone` or `EpisodeFailed`."""

    match: Match


class CancelMatch(_Message, frozen=True, kw_only=True, tag="cancel"):
    """Controller → worker: give this attempt up; answered by `EpisodeFailed` with kind ``cancelled``."""

    episode_id: str


class EpisodeDone(_Message, frozen=True, kw_only=True, tag="done"):
    """Worker → controller: a whole episode, encoded once by the worker; resent until `EpisodeAck`."""

    episode_id: str
    episode: bytes


class EpisodeFailed(_Message, frozen=True, kw_only=True, tag="failed"):
    """Worker → controller: no episode came of this attempt; resent until `EpisodeAck`.

    ``environment``: the game raised (played again it would raise again). ``infrastructure``: void, to be played again.
    """

    episode_id: str
    kind: Literal["environment", "infrastructure", "cancelled"]
    message: Text
    traceback: Text = ""


class EpisodeAck(_Message, frozen=True, kw_only=True, tag="ack"):
    """Controller → worker: the result of this attempt is safe; the worker may forget it."""

    episode_id: str


class Drain(_Message, frozen=True, kw_only=True, tag="drain"):
    """Controller → worker: finish what is in flight, then leave."""


WorkerMessage = WorkerHello | EpisodeDone | EpisodeFailed
ControllerMessage = PlayMatch | CancelMatch | EpisodeAck | Drain

# ── clients ⇄ policy server ──────────────────────────────────────────────────────────────────────


class PolicyHello(_Message, frozen=True, kw_only=True, tag="hello"):
    request: RequestId
    protocol: int


class PolicyInfo(_Message, frozen=True, kw_only=True, tag="info"):
    """Answer to `PolicyHello`: what is served."""

    request: RequestId
    protocol: int
    engine: str
    model: str
    max_model_len: int
    max_live_adapters: int
    stop_ids: tuple[int, ...]
    probe_ids: tuple[int, ...]
    """The fixed tokens on which trainer and engine logprobs are compared after each sync."""


class Generate(_Message, frozen=True, kw_only=True, tag="generate"):
    request: RequestId
    episode_id: str
    agent: str
    pin: Pin
    messages: tuple[Message, ...]
    known_messages: int
    prefix_ids: tuple[int, ...]
    sampling: Sampling
    timeout_s: float


class Generated(_Message, frozen=True, kw_only=True, tag="generated"):
    request: RequestId
    answer: Answer


class Choose(_Message, frozen=True, kw_only=True, tag="choose"):
    request: RequestId
    agent: str
    pin: Pin
    question: JuryQuestion
    timeout_s: float


class Chosen(_Message, frozen=True, kw_only=True, tag="chosen"):
    request: RequestId
    probabilities: dict[str, float]


MAX_ANSWERS = 512


class Score(_Message, frozen=True, kw_only=True, tag="score"):
    """How likely are these answers to a chat, word for word and then the end of the turn? At temperature 1."""

    request: RequestId
    agent: str
    pin: Pin
    messages: tuple[Message, ...]
    answers: Annotated[tuple[Text, ...], Meta(min_length=1, max_length=MAX_ANSWERS)]
    timeout_s: float


class Scored(_Message, frozen=True, kw_only=True, tag="scored"):
    request: RequestId
    logprobs: tuple[float, ...]
    """Natural log of each answer's probability, its end of turn included."""


class Cancel(_Message, frozen=True, kw_only=True, tag="cancel"):
    """Abort request ``target`` of the same client; idempotent, not answered."""

    request: RequestId
    target: RequestId


class EndEpisode(_Message, frozen=True, kw_only=True, tag="end"):
    """The episode is over: versions it pinned may go. Not answered."""

    request: RequestId
    episode_id: str


class BeginInstall(_Message, frozen=True, kw_only=True, tag="begin"):
    """Controller → server: get ready to receive ``version``; the engine stages it beside generation."""

    request: RequestId
    version: PolicyVersion
    header: BucketHeader


class CommitInstall(_Message, frozen=True, kw_only=True, tag="commit"):
    """Controller → server: the sender is done; verify and make the version addressable. Not yet current."""

    request: RequestId
    version: PolicyVersion
    timeout_s: float


class AbortInstall(_Message, frozen=True, kw_only=True, tag="abort"):
    """Controller → server: the sync failed; forget what was staged. The old version goes on serving."""

    request: RequestId
    version: PolicyVersion


class MakeCurrent(_Message, frozen=True, kw_only=True, tag="current"):
    """Controller → server, once *every* engine has committed: ``pin="turn"`` now means this version."""

    request: RequestId
    version: PolicyVersion


class Retire(_Message, frozen=True, kw_only=True, tag="retire"):
    """Controller → server: nobody will start on this version any more; dropped when its last user is done."""

    request: RequestId
    version: PolicyVersion


class Probe(_Message, frozen=True, kw_only=True, tag="probe"):
    """Controller → server: teacher-forced logprobs [T−1] of ``ids`` [T] under a version (None: base)."""

    request: RequestId
    version: PolicyVersion | None
    ids: tuple[int, ...]


class ProbeResult(_Message, frozen=True, kw_only=True, tag="probed"):
    request: RequestId
    logprobs: tuple[float, ...]


class Stats(_Message, frozen=True, kw_only=True, tag="stats"):
    request: RequestId


class StatsResult(_Message, frozen=True, kw_only=True, tag="statsed"):
    request: RequestId
    values: dict[str, float]


class Done(_Message, frozen=True, kw_only=True, tag="ok"):
    request: RequestId
    values: dict[str, float] = {}


class Refused(_Message, frozen=True, kw_only=True, tag="refused"):
    """The request could not be served. ``kind``: ``bad_request`` is final, ``unavailable`` may be tried again."""

    request: RequestId
    kind: Literal["bad_request", "unavailable", "timeout", "cancelled"]
    message: Text


class BucketHeader(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """One flat adapter on its way: what arrives, how long it is, and how to know it arrived whole."""

    transport: Literal["nccl", "gloo", "shm", "file"]
    address: str
    """shm, file: a path. gloo, nccl: rendezvous of the group that is already joined."""
    offset: int
    num_bytes: int
    crc32: int
    dtype: Literal["float32", "bfloat16", "float16"]
    layout: tuple[tuple[str, tuple[int, ...], int], ...]
    """(PEFT tensor name, shape, element offset) of each tensor in the bucket."""
    adapter_config: dict[str, Scalar | list[str]]
    """The PEFT adapter_config fields an engine needs: r, lora_alpha, target_modules, use_rslora, ..."""


class JoinWeights(_Message, frozen=True, kw_only=True, tag="join"):
    """Controller → server or trainer: join the weights group; the trainer is rank 0, engine workers follow."""

    request: RequestId
    transport: Literal["nccl", "gloo"]
    address: str
    rank: int
    world_size: int
    timeout_s: float


ToPolicy = (
    PolicyHello | Generate | Choose | Score | Cancel | EndEpisode | BeginInstall | CommitInstall | AbortInstall | MakeCurrent
    | Retire | Probe | Stats | JoinWeights
)  # fmt: skip
FromPolicy = PolicyInfo | Generated | Chosen | Scored | ProbeResult | StatsResult | Done | Refused

# ── controller ⇄ trainer rank ────────────────────────────────────────────────────────────────────


class TrainerHello(_Message, frozen=True, kw_only=True, tag="hello"):
    """First message of a rank: it is up, joined, and its adapters are as ``versions`` say."""

    protocol: int
    rank: int
    pid: int
    step: int
    versions: dict[str, int]


class TrainStep(_Message, frozen=True, kw_only=True, tag="step"):
    """Controller → every rank: one optimizer step.

    ``agents`` is the globally agreed, sorted list: every rank runs the same collectives for it, with empty segments for
    the absent. ``micro_batches`` has the same length on every rank. ``num_actions`` is the token normaliser over *all*
    ranks. An agent missing from ``agents`` had no signal and is not touched at all.
    """

    request: RequestId
    step: int
    agents: tuple[str, ...]
    micro_batches: tuple[tuple[Segment, ...], ...]
    num_actions: dict[str, int]


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
    ess: float
    """Effective sample size of the importance weights, as a share of the tokens."""
    entropy: float
    num_actions: int


class StepDone(_Message, frozen=True, kw_only=True, tag="stepped"):
    request: RequestId
    rank: int
    step: int
    agents: dict[str, AgentReport]
    num_tokens: int
    duration_s: float


class Export(_Message, frozen=True, kw_only=True, tag="export"):
    """Controller → rank 0: write the adapter to ``folder`` (PEFT format) and gather it into a bucket for ``transport``."""

    request: RequestId
    version: PolicyVersion
    folder: str
    transport: Literal["nccl", "gloo", "shm", "file"]
    address: str


class Exported(_Message, frozen=True, kw_only=True, tag="exported"):
    request: RequestId
    digest: str
    header: BucketHeader


class Send(_Message, frozen=True, kw_only=True, tag="send"):
    """Controller → rank 0: send the exported bucket now (the receivers are waiting)."""

    request: RequestId
    version: PolicyVersion
    timeout_s: float


class TrainerProbe(_Message, frozen=True, kw_only=True, tag="probe"):
    request: RequestId
    agent: str
    ids: tuple[int, ...]


class Save(_Message, frozen=True, kw_only=True, tag="save"):
    """Controller → every rank: save the training state into ``folder`` (a collective)."""

    request: RequestId
    folder: str


class Stop(_Message, frozen=True, kw_only=True, tag="stop"):
    request: RequestId


class TrainerDone(_Message, frozen=True, kw_only=True, tag="ok"):
    request: RequestId
    rank: int
    values: dict[str, float] = {}


class TrainerProbed(_Message, frozen=True, kw_only=True, tag="probed"):
    """Every rank answers a probe; rank 0 with the values, the others with none."""

    request: RequestId
    rank: int
    logprobs: tuple[float, ...]


class TrainerFailed(_Message, frozen=True, kw_only=True, tag="failed"):
    """A rank cannot go on; the full traceback is in its log file."""

    request: RequestId
    rank: int
    message: Text


ToTrainer = TrainStep | Export | Send | TrainerProbe | Save | JoinWeights | Stop
FromTrainer = TrainerHello | StepDone | Exported | TrainerDone | TrainerProbed | TrainerFailed
