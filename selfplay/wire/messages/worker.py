"""Controller ⇄ environment worker: matches out, whole episodes back."""

from __future__ import annotations

from typing import Literal

from selfplay.types import Match
from selfplay.wire.messages.base import Text, WireMessage


class WorkerHello(WireMessage, frozen=True, kw_only=True, tag="hello"):
    """First message of a worker process; ``worker`` is unique per process start."""

    protocol: int
    worker: str
    pid: int


class PlayMatch(WireMessage, frozen=True, kw_only=True, tag="play"):
    """Controller → worker: play this match. The lease ends with `EpisodeDone` or `EpisodeFailed`."""

    match: Match


class CancelMatch(WireMessage, frozen=True, kw_only=True, tag="cancel"):
    """Controller → worker: give this attempt up; answered by `EpisodeFailed` with kind ``cancelled``."""

    episode_id: str


class EpisodeDone(WireMessage, frozen=True, kw_only=True, tag="done"):
    """Worker → controller: a whole episode, encoded once by the worker; resent until `EpisodeAck`."""

    episode_id: str
    episode: bytes


class EpisodeFailed(WireMessage, frozen=True, kw_only=True, tag="failed"):
    """Worker → controller: no episode came of this attempt; resent until `EpisodeAck`.

    ``environment``: the game raised (played again it would raise again). ``infrastructure``: void, to be played again.
    """

    episode_id: str
    kind: Literal["environment", "infrastructure", "cancelled"]
    message: Text
    traceback: Text = ""


class EpisodeAck(WireMessage, frozen=True, kw_only=True, tag="ack"):
    """Controller → worker: the result of this attempt is safe; the worker may forget it."""

    episode_id: str


class Drain(WireMessage, frozen=True, kw_only=True, tag="drain"):
    """Controller → worker: finish what is in flight, then leave."""


WorkerMessage = WorkerHello | EpisodeDone | EpisodeFailed
ControllerMessage = PlayMatch | CancelMatch | EpisodeAck | Drain
