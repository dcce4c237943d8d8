"""One remote pool as the run sees it: what it may ask, what of its words is believed, and when it has to go.

A pool that was let in is trusted to play by the rules, and to no more: it speaks about its own matches only, its questions
are the ones that those matches need, and what it says a model answered must be what the model did answer.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Callable
from typing import Any

import msgspec

from selfplay.agent import Answer
from selfplay.pool.results import POOL_FAULT, EpisodeResult, FailedResult, Result
from selfplay.types import Episode, Match, Turn
from selfplay.wire.codec import encode
from selfplay.wire.messages import CancelMatch, Choose, ControllerMessage, Generate, PlayMatch, Terms

MAX_FAULTS = 5
"""Faults in a row after which a pool is sent away."""
_QUESTIONS_PER_MATCH = 32
MODEL_PLAYER = "llm"


class RemotePool:
    """A joined pool; `selfplay.pool.workers.Guest` for the supervisor, a peer with a key for the gateway."""

    def __init__(
        self,
        *,
        name: str,
        identity: bytes,
        key: bytes,
        max_slots: int,
        terms: Terms,
        send: Callable[[bytes, Any], bool],
        send_away: Callable[[RemotePool, str], None],
    ) -> None:
        self.name, self.identity, self.key, self.max_slots = name, identity, key, max_slots
        self.slots, self.ready = 0, True
        self.heard_at = time.monotonic()
        self.asking: dict[int, asyncio.Task[None]] = {}
        """Questions under way, by the pool's own request id."""
        self._terms, self._send, self._send_away = terms, send, send_away
        self._matches: dict[str, Match] = {}
        self._answers: dict[str, set[bytes]] = {}
        self._cancelled: set[str] = set()
        self._faults = 0
        self.num_played = 0

    # ── what the supervisor calls ─────────────────────────────────────────────────────────────

    def give(self, match: Match) -> bool:
        """Send a match; False when the pool cannot be reached."""
        self._matches[match.episode_id], self._answers[match.episode_id] = match, set()
        return self.tell(PlayMatch(match=match))

    def tell(self, message: ControllerMessage) -> bool:
        if isinstance(message, CancelMatch):
            self._cancelled.add(message.episode_id)
        return self._send(self.identity, message)

    def judged(self, result: Result) -> Result:
        """An episode passes when every answer in it is one that was given. A failure is void, not final: the match is
        played again elsewhere, and whether it fails there is for a worker of the run to say."""
        episode_id = result.match.episode_id
        answers = self._answers.pop(episode_id, set())
        self._matches.pop(episode_id, None)
        was_cancelled = episode_id in self._cancelled
        self._cancelled.discard(episode_id)
        if isinstance(result, EpisodeResult):
            forged = _forged(result.episode, answers)
            if not forged:
                self._faults, self.num_played = 0, self.num_played + 1
                return result
            message = f"episode {episode_id}: {forged}"
        elif result.kind == "cancelled" and was_cancelled:
            return result
        else:
            message = result.message
        self.fault(message)
        return FailedResult(
            match=result.match, kind="infrastructure", reason=POOL_FAULT, message=f"remote pool {self.name}: {message}"
        )

    def expel(self, why: str) -> None:
        """Send it away."""
        self._send_away(self, why)

    # ── what the gateway calls ────────────────────────────────────────────────────────────────

    @property
    def held(self) -> tuple[str, ...]:
        """Episodes whose result has not come."""
        return tuple(self._matches)

    def fault(self, what: str) -> None:
        """Count something that a sound pool does not do; too many in a row and it has to go."""
        self._faults += 1
        if self._faults >= MAX_FAULTS:
            # Soon, not now: whoever reports the fault is not done with this pool yet.
            asyncio.get_running_loop().call_soon(
                self._send_away, self, f"{self._faults} faults in a row; the last: {what}"
            )

    def why_not(self, message: Generate | Choose) -> str:
        """Why the run does not ask its models this; empty for a question that a match of the pool needs."""
        if len(self.asking) >= _QUESTIONS_PER_MATCH * max(1, len(self._matches)):
            return f"{len(self.asking)} questions are under way"
        if message.request in self.asking:
            return f"request {message.request} is under way"
        if isinstance(message, Choose):
            juror, _, version = self._terms.jury.partition("@")
            known = message.agent == juror and (not version or message.pin == int(version))
            return "" if known and self._matches else f"{message.agent} is not the jury of a game of this pool"
        match = self._matches.get(message.episode_id)
        if match is None:
            return f"episode {message.episode_id[:40]} is not with this pool"
        if not any(s.agent == message.agent and s.pin == message.pin for s in match.seats):
            return f"{message.agent[:60]} with pin {message.pin} does not play in episode {message.episode_id}"
        sampling, ours = message.sampling, self._terms.sampling
        if sampling.max_tokens > ours.max_tokens:
            return f"{sampling.max_tokens} tokens are more than {ours.max_tokens}"
        if msgspec.structs.replace(sampling, seed=ours.seed, max_tokens=ours.max_tokens) != ours:
            return "the run does not sample like this"
        return ""

    def answered(self, message: Generate | Choose, answer: Answer) -> None:
        """Remember what a model said in a game of this pool."""
        if isinstance(message, Generate) and message.episode_id in self._answers:
            self._answers[message.episode_id].add(_fingerprint(message.agent, answer))


def _forged(episode: Episode, answers: set[bytes]) -> str:
    """What a pool claims a model said, and the model did not; empty when there is no such thing."""
    players = {s.seat: s.player for s in episode.match.seats}
    for i, turn in enumerate(episode.turns):
        by_model = bool(turn.sampled_ids) or players[turn.seat] == MODEL_PLAYER
        if by_model and _fingerprint(turn.agent, turn) not in answers:
            return f"turn {i} of {turn.seat} is not what {turn.agent} answered"
    return ""


def _fingerprint(agent: str, said: Answer | Turn) -> bytes:
    parts = [agent, said.sampled_ids, said.logprobs, said.spans, said.kept, said.stop_reason]
    return hashlib.blake2b(encode(parts), digest_size=16).digest()
