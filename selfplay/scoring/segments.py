"""Episode + advantages → segments: the token streams an agent learns from, with exactly its own tokens marked.

A seat's context is the concatenation of its turns' ``prompt_ids`` and ``sampled_ids`` in order; a turn with ``fork``
starts a new segment with its whole context. Sampled tokens are actions, the stop token included, whether the move they
spelt was legal or not. Everything else (rules, views, opponents' words, chat markup) has mask 0. Ids are taken as they
were sampled and nothing is ever made from text, so what an action was sampled from is what precedes it here.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import msgspec

from selfplay.types import Episode, SeatAssignment, Segment, Turn

Advantage = float | Sequence[float]
"""One number for a whole seat, or one per turn of the seat (its illegal tries included), in order."""


def episode_segments(episode: Episode, advantages: Mapping[str, Advantage]) -> list[Segment]:
    """Segments of the trained seats, by seat in match order, then in playing order.

    ``advantages`` has every trained seat. A stream without a sampled token yields nothing, and context after the last
    action is cut off. Raises ValueError for a token record that cannot be trained on, naming seat and turn.
    """
    segments = []
    for assignment in episode.match.seats:
        if assignment.trained:
            turns = [t for t in episode.turns if t.seat == assignment.seat]
            segments += _seat_segments(episode.episode_id, assignment, turns, advantages[assignment.seat])
    return segments


def agents_with_signal(segments: Iterable[Segment]) -> tuple[str, ...]:
    """Agents that have an action with an advantage other than zero, sorted; the others are left out of the step."""
    return tuple(sorted({s.agent for s in segments if any(s.advantages)}))


def learning_now(agents: Iterable[str], trained: Iterable[str], step: int, alternate: int) -> tuple[str, ...]:
    """Those of ``agents`` that learn in ``step``: all, or with ``alternate`` = N one after the other for N steps each.

    The turns go by the sorted names of all ``trained`` agents, so a step without signal costs nobody a turn.
    """
    order = sorted(trained)
    if not alternate:
        return tuple(sorted(agents))
    return tuple(a for a in agents if a == order[step // alternate % len(order)])


def action_counts(segments: Iterable[Segment], agents: Iterable[str]) -> dict[str, int]:
    """Agent → number of action tokens over all segments: the agent's own token normaliser."""
    counts = dict.fromkeys(agents, 0)
    for segment in segments:
        if segment.agent in counts:
            counts[segment.agent] += segment.num_actions
    return counts


def sequence_counts(segments: Iterable[Segment], agents: Iterable[str]) -> dict[str, int]:
    """Agent → number of its segments: the agent's own sequence normaliser."""
    counts = dict.fromkeys(agents, 0)
    for segment in segments:
        if segment.agent in counts:
            counts[segment.agent] += 1
    return counts


class SegmentAges(msgspec.Struct, frozen=True, kw_only=True):
    """Versions between the weights that sampled an agent's segments and those that learn from them, and if there is a signal."""

    staleness_mean: float = 0.0
    """Of the oldest version in each segment."""
    staleness_max: int = 0
    span_max: int = 0
    """Most versions that took part in one segment, less one."""
    silent_share: float = 0.0
    """Of its segments, those without any advantage: what equal rewards in a group, or a reward as expected, leave to learn."""


def segment_ages(segments: Iterable[Segment], current: Mapping[str, int]) -> dict[str, SegmentAges]:
    """Agent → ages of its segments, against the ``current`` versions of the trainer."""
    by_agent: dict[str, list[Segment]] = {}
    for segment in segments:
        by_agent.setdefault(segment.agent, []).append(segment)
    out = {}
    for agent, own in by_agent.items():
        stale = [current[agent] - s.versions[0] for s in own]
        out[agent] = SegmentAges(
            staleness_mean=sum(stale) / len(stale), staleness_max=max(stale),
            span_max=max(s.versions[1] - s.versions[0] for s in own),
            silent_share=sum(not any(s.advantages) for s in own) / len(own),
        )  # fmt: skip
    return out


@dataclass
class _Stream:
    """A segment being built: parallel lists [T]."""

    ids: list[int] = field(default_factory=list)
    mask: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    advantages: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    kept: list[tuple[int, ...]] = field(default_factory=list)
    """Of each action; () where it was the whole vocabulary."""
    num_used: int = 0
    """Tokens up to and including the last action."""

    def context(self, ids: Sequence[int]) -> None:
        self._extend(ids, 0, [0.0] * len(ids), 0.0)

    def actions(self, turn: Turn, advantage: float) -> None:
        self._extend(turn.sampled_ids, 1, turn.logprobs, advantage)
        self.kept += turn.kept or [()] * len(turn.sampled_ids)
        self.versions += [span.version for span in turn.spans if span.end > span.start]
        self.num_used = len(self.ids)

    def _extend(self, ids: Sequence[int], mask: int, logprobs: Sequence[float], advantage: float) -> None:
        self.ids += ids
        self.mask += [mask] * len(ids)
        self.logprobs += logprobs
        self.advantages += [advantage] * len(ids)


def _seat_segments(
    episode_id: str, assignment: SeatAssignment, turns: Sequence[Turn], advantage: Advantage
) -> list[Segment]:
    streams = [_Stream()]
    for i, (turn, value) in enumerate(zip(turns, _per_turn(advantage, turns, assignment.seat), strict=True)):
        if turn.fork:
            streams.append(_Stream())
        stream = streams[-1]
        stream.context(turn.prompt_ids)
        if not turn.sampled_ids:
            continue
        _check_actions(turn, stream, f"episode {episode_id}, seat {assignment.seat}, turn {i} of the seat")
        stream.actions(turn, value)
    return [_segment(episode_id, assignment, stream) for stream in streams if stream.num_used]


def _per_turn(advantage: Advantage, turns: Sequence[Turn], seat: str) -> Sequence[float]:
    if isinstance(advantage, int | float):
        return [float(advantage)] * len(turns)
    if len(advantage) != len(turns):
        raise ValueError(f"seat {seat} has {len(turns)} turns but {len(advantage)} advantages")
    return advantage


def _check_actions(turn: Turn, stream: _Stream, where: str) -> None:
    if not stream.ids:
        raise ValueError(f"{where}: tokens were sampled from an empty context")
    if len(turn.logprobs) != len(turn.sampled_ids):
        raise ValueError(f"{where}: {len(turn.sampled_ids)} sampled tokens but {len(turn.logprobs)} logprobs")
    if not any(span.end > span.start for span in turn.spans):
        raise ValueError(f"{where}: nothing says which version sampled the tokens")


def _segment(episode_id: str, assignment: SeatAssignment, stream: _Stream) -> Segment:
    end = stream.num_used
    return Segment(
        episode_id=episode_id, agent=assignment.agent, seat=assignment.seat,
        ids=tuple(stream.ids[:end]), mask=tuple(stream.mask[:end]), logprobs=tuple(stream.logprobs[:end]),
        advantages=tuple(stream.advantages[:end]), versions=(min(stream.versions), max(stream.versions)),
        kept=tuple(stream.kept) if any(stream.kept) else (),
    )  # fmt: skip
