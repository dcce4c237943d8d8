"""What comes out of a pool, and the check every worker's result goes through before it is believed.

A worker may be faulty: it can only speak about a match it was given, and only with an episode that fits the schema, that
match, and the rules of `selfplay.types.episode_faults`.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from selfplay.errors import WireError
from selfplay.types import Episode, Match, episode_faults
from selfplay.wire.codec import Codec, encode
from selfplay.wire.messages import EpisodeDone, EpisodeFailed

FailureKind = Literal["environment", "invalid", "infrastructure", "cancelled"]
"""environment: the game raised or got stuck; it would again. invalid: an episode came, but it is not sound.
infrastructure: void, to be played again under the next attempt. cancelled: as asked."""

WORKER_LOST, POOL_LEFT, POOL_FAULT = "worker lost", "pool left", "pool fault"
"""Reasons of void attempts that say something of their holder and nothing of the match."""

_REASONS = {"environment": "raised", "infrastructure": "engine", "cancelled": "cancelled"}
_MAX_FAULTS_SHOWN = 5
_episodes: Codec[Episode] = Codec(Episode)


class EpisodeResult(msgspec.Struct, frozen=True, kw_only=True):
    """A sound episode; ``data`` is its encoding, and decodes to exactly ``episode``."""

    match: Match
    episode: Episode
    data: bytes


class FailedResult(msgspec.Struct, frozen=True, kw_only=True):
    """No episode came of this attempt. ``reason`` is a short label to count by, ``message`` is for people."""

    match: Match
    kind: FailureKind
    reason: str
    message: str
    traceback: str = ""

    @property
    def holder_lost(self) -> bool:
        """Whoever held the match went away or failed: no sign that playing it fails."""
        return self.reason in (WORKER_LOST, POOL_LEFT, POOL_FAULT)


Result = EpisodeResult | FailedResult


class Lease(msgspec.Struct, frozen=True, kw_only=True):
    """One match in the hands of one worker, since a moment of the monotonic clock."""

    match: Match
    worker: str
    since: float


class Held(msgspec.Struct, frozen=True, kw_only=True):
    """A lease as reports show it."""

    episode_id: str
    worker: str
    age_s: float


def checked_result(lease: Lease, message: EpisodeDone | EpisodeFailed) -> Result:
    """What a worker's message about its own lease amounts to."""
    match = lease.match
    if isinstance(message, EpisodeFailed):
        return FailedResult(
            match=match, kind=message.kind, reason=_REASONS[message.kind], message=message.message,
            traceback=message.traceback,
        )  # fmt: skip
    try:
        episode = _episodes.decode(message.episode)
    except WireError as e:
        return _invalid(match, [str(e)])
    faults = _match_faults(episode, match) or episode_faults(episode)
    if faults:
        return _invalid(match, faults)
    # Encoded anew: what is stored is exactly what was checked, without fields or keys the schema does not know.
    return EpisodeResult(match=match, episode=episode, data=encode(episode))


def _match_faults(episode: Episode, match: Match) -> list[str]:
    if episode.match != match:
        return [f"the episode is of match {episode.episode_id}, not of the match {match.episode_id} that was given out"]
    pinned = {s.seat: s.pin for s in match.seats if isinstance(s.pin, int)}
    return [
        f"turn {i}: {turn.agent} was to play as version {pinned[turn.seat]} but sampled with {span.version}"
        for i, turn in enumerate(episode.turns)
        for span in turn.spans
        if turn.seat in pinned and span.version != pinned[turn.seat]
    ]


def _invalid(match: Match, faults: list[str]) -> FailedResult:
    shown = "; ".join(faults[:_MAX_FAULTS_SHOWN])
    more = f" (and {len(faults) - _MAX_FAULTS_SHOWN} more)" if len(faults) > _MAX_FAULTS_SHOWN else ""
    message = f"{match.env} seed {match.seed}: episode {match.episode_id} is not sound: {shown}{more}"
    return FailedResult(match=match, kind="invalid", reason="invalid", message=message)


def place(match: Match) -> str:
    """Which game it is, for people."""
    return f"{match.env} (seed {match.seed}, episode {match.episode_id})"


def void_result(lease: Lease, reason: str, how: str) -> FailedResult:
    """Nothing came of an attempt, through no fault of the match."""
    return FailedResult(match=lease.match, kind="infrastructure", reason=reason, message=how)


def stuck_result(lease: Lease, how: str, stack: str) -> FailedResult:
    """The game of an attempt held up its worker until that was killed."""
    message = f"{place(lease.match)} never gave its worker back: {how}"
    return FailedResult(match=lease.match, kind="environment", reason="stuck", message=message, traceback=stack)
