"""A run ⇄ an environment pool of another process or host: matches and answers one way, episodes and questions the other.

The first fields of `PoolHello` and `PoolRefused` never change, so that two versions of selfplay can still tell each other
that they do not fit together.
"""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from selfplay.agent import Sampling
from selfplay.types.match import ShortText
from selfplay.wire.messages.base import Text, WireMessage
from selfplay.wire.messages.policy import Cancel, Choose, Chosen, Generate, Generated, Refused
from selfplay.wire.messages.worker import CancelMatch, EpisodeAck, EpisodeDone, EpisodeFailed, PlayMatch

Slots = Annotated[int, Meta(ge=0, le=100_000)]


class PoolHello(WireMessage, frozen=True, kw_only=True, tag="pool"):
    """Pool → run, first: what it speaks and what it can play. ``source`` is the environment's provenance, to the byte."""

    protocol: int
    env: ShortText
    source: ShortText
    slots: Slots
    """Games at once."""


class PoolPulse(WireMessage, frozen=True, kw_only=True, tag="pulse"):
    """Pool → run, at least once a second: it lives, and would take so many games at once just now."""

    slots: Slots


class PoolLeaves(WireMessage, frozen=True, kw_only=True, tag="leaves"):
    """Pool → run: what it still holds will not be played."""

    reason: Text


class AskPolicy(WireMessage, frozen=True, kw_only=True, tag="ask"):
    """Pool → run: a question to the model, of a game that the pool holds. Request ids are the pool's own."""

    message: Generate | Choose | Cancel


class Terms(msgspec.Struct, frozen=True, kw_only=True):
    """How a run's games are played."""

    sampling: Sampling
    jury: ShortText
    """``base`` or ``agent@n``."""
    episode_timeout_s: Annotated[float, Meta(gt=0)]
    request_timeout_s: Annotated[float, Meta(gt=0)]
    silence_s: Annotated[float, Meta(gt=0)]
    """A side that hears nothing for so long takes the other for gone."""


class PoolWelcome(WireMessage, frozen=True, kw_only=True, tag="welcome"):
    """Run → pool: matches will follow."""

    name: ShortText
    """What the run calls this pool."""
    slots: Slots
    """Games at once that it may hold."""
    terms: Terms


class PoolRefused(WireMessage, frozen=True, kw_only=True, tag="refused"):
    """Run → pool: no more is wanted of it, and why."""

    protocol: int
    reason: Text


class RunPulse(WireMessage, frozen=True, kw_only=True, tag="pulse"):
    """Run → pool: it lives."""


class RunEnds(WireMessage, frozen=True, kw_only=True, tag="ends"):
    """Run → pool: it is over; thank you."""


class PolicyAnswer(WireMessage, frozen=True, kw_only=True, tag="answer"):
    """Run → pool: the answer to an `AskPolicy`, under its request id."""

    message: Generated | Chosen | Refused


FromPool = PoolHello | PoolPulse | PoolLeaves | AskPolicy | EpisodeDone | EpisodeFailed
ToPool = (
    PoolWelcome | PoolRefused | RunPulse | RunEnds | PolicyAnswer | PlayMatch | CancelMatch | EpisodeAck
)  # fmt: skip
