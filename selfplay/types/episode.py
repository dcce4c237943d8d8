"""What was played: turns, episodes, and the segments a trainer consumes.

An `Episode` is built once, whole and frozen. Token ids are stored as sampled; the context of a seat's turn is the
concatenation of that seat's earlier ``prompt_ids`` and ``sampled_ids`` since its last fork, plus this ``prompt_ids``.

``gc=False``: what holds only text and numbers is in no reference cycle, and the collector need not walk it.
"""

from __future__ import annotations

import math
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from selfplay.types.match import Match, Scalar

TokenId = Annotated[int, Meta(ge=0, lt=2**31)]
StopReason = Literal["stop", "length", "context", "abort", "none"]
"""stop: the model ended its turn. length: cut at the turn's budget. context: cut at the model length.
abort: cancelled. none: the mover is not a language model."""

Ended = Literal["natural", "forfeit", "truncated"]
MAX_TEXT = 1_000_000


class Span(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Tokens ``[start, end)`` of a turn were sampled by ``version`` of the turn's agent."""

    version: int
    start: int
    end: int


class Turn(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, gc=False):
    """One decision of one seat. P prompt-delta tokens, C sampled tokens; both empty for movers without a model."""

    seat: str
    agent: str
    round: int
    """Counts decision points of the game; simultaneous moves share one."""
    prompt_ids: tuple[TokenId, ...] = ()
    """[P] tokens added to the seat's context before sampling; the whole context when ``fork``."""
    fork: bool = False
    """The template rewrote history: the context starts afresh with ``prompt_ids``."""
    sampled_ids: tuple[TokenId, ...] = ()
    """[C] as sampled, the stop token included."""
    logprobs: tuple[float, ...] = ()
    """[C] natural log, of the distribution that was sampled from (after temperature)."""
    spans: tuple[Span, ...] = ()
    """Which version sampled which tokens; contiguous over [0, C)."""
    kept: tuple[tuple[TokenId, ...], ...] = ()
    """[C] with top-k or top-p sampling: the tokens that each was sampled among; empty when that was the whole vocabulary."""
    stop_reason: StopReason = "none"
    text: Annotated[str, Meta(max_length=MAX_TEXT)] = ""
    move: str | None = None
    """The move as the environment understood it; None when illegal."""
    note: Annotated[str, Meta(max_length=2000)] = ""
    """Why the move was illegal, as told to the seat."""
    latency_s: float = 0.0

    @property
    def legal(self) -> bool:
        return self.move is not None


class JuryRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One question put to the jury and its answer: probability mass of each label."""

    question: str
    labels: tuple[str, ...]
    probabilities: tuple[float, ...]
    juror: str


class Episode(msgspec.Struct, frozen=True, kw_only=True):
    """All turns of all seats with their rewards: the atomic unit of storage, training and accounting."""

    match: Match
    env_source: str
    """Distribution and version the environment came from, for example ``selfplay 0.1.0``."""
    turns: tuple[Turn, ...]
    rewards: dict[str, float]
    """Seat → final reward."""
    winners: tuple[str, ...]
    """Seats that won; empty for a draw. Decided by the game, never by the sign of a reward."""
    ended: Ended
    reason: str
    """The game's own words for how it ended, or which cap was reached, or why a seat forfeited."""
    offender: str | None = None
    """The seat that forfeited."""
    jury: tuple[JuryRecord, ...] = ()
    info: dict[str, Scalar] = {}
    duration_s: float = 0.0

    @property
    def episode_id(self) -> str:
        return self.match.episode_id

    def versions(self) -> dict[str, tuple[int, int]]:
        """Version vector: agent → (oldest, newest) version that sampled a token, opponents included."""
        out: dict[str, tuple[int, int]] = {}
        for turn in self.turns:
            for span in turn.spans:
                lo, hi = out.get(turn.agent, (span.version, span.version))
                out[turn.agent] = (min(lo, span.version), max(hi, span.version))
        return out

    def trained_agents(self) -> tuple[str, ...]:
        """Agents of this episode that learn from it, sorted."""
        return tuple(sorted({s.agent for s in self.match.seats if s.trained}))

    def staleness(self, current: dict[str, int]) -> int:
        """Max over trained agents of (current − oldest version used); frozen opponents do not age."""
        versions, trained = self.versions(), set(self.trained_agents())
        return max((current[a] - lo for a, (lo, _) in versions.items() if a in trained), default=0)

    def num_tokens(self) -> tuple[int, int]:
        """(prompt-delta tokens, sampled tokens) over all seats."""
        return sum(len(t.prompt_ids) for t in self.turns), sum(len(t.sampled_ids) for t in self.turns)


def episode_faults(episode: Episode) -> list[str]:
    """Everything wrong with an episode's contents that its schema cannot see; empty when it is sound."""
    faults = [f"reward of {s} is {r}" for s, r in episode.rewards.items() if not math.isfinite(r)]
    seats = {s.seat: s for s in episode.match.seats}
    if set(episode.rewards) != set(seats):
        faults.append(f"rewards for {sorted(episode.rewards)} but seats are {sorted(seats)}")
    if not set(episode.winners) <= set(seats):
        faults.append(f"winners {episode.winners} are not all seats")
    for i, turn in enumerate(episode.turns):
        faults += [f"turn {i}: {f}" for f in _turn_faults(turn, seats.get(turn.seat) is not None)]
        if turn.seat in seats and seats[turn.seat].agent != turn.agent:
            faults.append(f"turn {i}: agent {turn.agent} speaks for {turn.seat}")
    return faults


def _turn_faults(turn: Turn, known_seat: bool) -> list[str]:
    faults = [] if known_seat else [f"seat {turn.seat!r} is not in the match"]
    num = len(turn.sampled_ids)
    if len(turn.logprobs) != num:
        faults.append(f"{num} sampled tokens but {len(turn.logprobs)} logprobs")
    if not all(math.isfinite(x) and x <= 1e-3 for x in turn.logprobs):
        faults.append("a logprob is not a finite number ≤ 0")
    if turn.kept and (
        len(turn.kept) != num or any(t not in k for t, k in zip(turn.sampled_ids, turn.kept, strict=False))
    ):
        faults.append("a sampled token is not among those that were left to sample from")
    edge = 0
    for span in turn.spans:
        if span.start != edge or span.end < span.start or span.version < 0:
            faults.append("version spans do not cover the tokens in order")
            break
        edge = span.end
    if turn.spans and edge != num:
        faults.append("version spans do not cover the sampled tokens")
    return faults


class Segment(msgspec.Struct, frozen=True, kw_only=True):
    """What the trainer consumes: one contiguous token sequence [T] of one agent in one episode.

    ``mask[t]`` is 1 where ``ids[t]`` was sampled by the agent. ``logprobs[t]`` and ``advantages[t]`` are
    meaningful where the mask is 1 and 0 elsewhere. Position 0 is never an action.
    """

    episode_id: str
    agent: str
    seat: str
    ids: tuple[TokenId, ...]
    mask: tuple[int, ...]
    logprobs: tuple[float, ...]
    advantages: tuple[float, ...]
    versions: tuple[int, int]
    """Oldest and newest version that sampled in this segment."""
    kept: tuple[tuple[TokenId, ...], ...] = ()
    """For each action in order, the tokens it was sampled among; empty when that was always the whole vocabulary."""

    @property
    def num_actions(self) -> int:
        return sum(self.mask)
