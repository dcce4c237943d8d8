"""Workers and controller ⇄ policy server: generation, scoring, and the life of adapter versions."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from selfplay.agent import Answer, Message, Sampling
from selfplay.environment import JuryQuestion
from selfplay.types import PolicyVersion
from selfplay.wire.messages.base import BucketHeader, JoinWeights, Pin, RequestId, Text, WireMessage

Flights = Literal["finish", "swap", "resume"]


class PolicyHello(WireMessage, frozen=True, kw_only=True, tag="hello"):
    request: RequestId
    protocol: int


class PolicyInfo(WireMessage, frozen=True, kw_only=True, tag="info"):
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


class Generate(WireMessage, frozen=True, kw_only=True, tag="generate"):
    request: RequestId
    episode_id: str
    agent: str
    pin: Pin
    messages: tuple[Message, ...]
    known_messages: int
    prefix_ids: tuple[int, ...]
    sampling: Sampling
    timeout_s: float


class Generated(WireMessage, frozen=True, kw_only=True, tag="generated"):
    request: RequestId
    answer: Answer


class Choose(WireMessage, frozen=True, kw_only=True, tag="choose"):
    request: RequestId
    agent: str
    pin: Pin
    question: JuryQuestion
    timeout_s: float


class Chosen(WireMessage, frozen=True, kw_only=True, tag="chosen"):
    request: RequestId
    probabilities: dict[str, float]


MAX_ANSWERS = 512


class Score(WireMessage, frozen=True, kw_only=True, tag="score"):
    """How likely are these answers to a chat, word for word and then the end of the turn? At temperature 1."""

    request: RequestId
    agent: str
    pin: Pin
    messages: tuple[Message, ...]
    answers: Annotated[tuple[Text, ...], Meta(min_length=1, max_length=MAX_ANSWERS)]
    timeout_s: float


class Scored(WireMessage, frozen=True, kw_only=True, tag="scored"):
    request: RequestId
    logprobs: tuple[float, ...]
    """Natural log of each answer's probability, its end of turn included."""


class Cancel(WireMessage, frozen=True, kw_only=True, tag="cancel"):
    """Abort request ``target`` of the same client; idempotent, not answered."""

    request: RequestId
    target: RequestId


class EndEpisode(WireMessage, frozen=True, kw_only=True, tag="end"):
    """The episode is over: versions it pinned may go. Not answered."""

    request: RequestId
    episode_id: str


class BeginInstall(WireMessage, frozen=True, kw_only=True, tag="begin"):
    """Controller → server: get ready to receive ``version``; the engine stages it beside generation."""

    request: RequestId
    version: PolicyVersion
    header: BucketHeader


class CommitInstall(WireMessage, frozen=True, kw_only=True, tag="commit"):
    """Controller → server: the sender is done; verify and make the version addressable. Not yet current."""

    request: RequestId
    version: PolicyVersion
    timeout_s: float


class AbortInstall(WireMessage, frozen=True, kw_only=True, tag="abort"):
    """Controller → server: the sync failed; forget what was staged. The old version goes on serving."""

    request: RequestId
    version: PolicyVersion


class MakeCurrent(WireMessage, frozen=True, kw_only=True, tag="current"):
    """Controller → server, once *every* engine has committed: ``pin="turn"`` now means this version.

    ``flights``: what becomes of answers of that agent under way that are not pinned. ``finish``: they end on their version;
    ``swap``: their next token is of the new one, on the cache they have; ``resume``: they are aborted, keep their tokens
    and go on under the new one. `Done` carries how many there were: ``swapped``, ``resumed``, ``left``.
    """

    request: RequestId
    version: PolicyVersion
    flights: Flights = "finish"


class Hold(WireMessage, frozen=True, kw_only=True, tag="hold"):
    """Controller → server: let no answer of ``agents`` (empty: of anybody) begin until `Release`.

    Answered once none is under way: they end by themselves, or with ``abort`` at once, to go on from their tokens after
    the release. `Done` carries ``under_way`` and ``waited_s``; `Refused`, and no hold, when it takes over ``timeout_s``.
    A hold that nobody releases ends after ``lease_s``.
    """

    request: RequestId
    agents: tuple[str, ...]
    abort: bool
    timeout_s: float
    lease_s: float


class Release(WireMessage, frozen=True, kw_only=True, tag="release"):
    """Controller → server: end the hold; harmless without one."""

    request: RequestId


class Retire(WireMessage, frozen=True, kw_only=True, tag="retire"):
    """Controller → server: nobody will start on this version any more; dropped when its last user is done."""

    request: RequestId
    version: PolicyVersion


class Probe(WireMessage, frozen=True, kw_only=True, tag="probe"):
    """Controller → server: teacher-forced logprobs [T−1] of ``ids`` [T] under a version (None: base)."""

    request: RequestId
    version: PolicyVersion | None
    ids: tuple[int, ...]


class ProbeResult(WireMessage, frozen=True, kw_only=True, tag="probed"):
    request: RequestId
    logprobs: tuple[float, ...]


class Stats(WireMessage, frozen=True, kw_only=True, tag="stats"):
    request: RequestId


class StatsResult(WireMessage, frozen=True, kw_only=True, tag="statsed"):
    request: RequestId
    values: dict[str, float]


class Done(WireMessage, frozen=True, kw_only=True, tag="ok"):
    request: RequestId
    values: dict[str, float] = msgspec.field(default_factory=dict)


class Refused(WireMessage, frozen=True, kw_only=True, tag="refused"):
    """The request could not be served. ``kind``: ``bad_request`` is final, ``unavailable`` may be tried again."""

    request: RequestId
    kind: Literal["bad_request", "unavailable", "timeout", "cancelled"]
    message: Text


ToPolicy = (
    PolicyHello | Generate | Choose | Score | Cancel | EndEpisode | BeginInstall | CommitInstall | AbortInstall | MakeCurrent
    | Hold | Release | Retire | Probe | Stats | JoinWeights
)  # fmt: skip
FromPolicy = PolicyInfo | Generated | Chosen | Scored | ProbeResult | StatsResult | Done | Refused
