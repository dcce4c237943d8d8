"""The part of ``selfplay bench train`` that is about shared beginnings: rows as tries against rows of whole segments.

In: a batch of a group of games of one scenario, and a batch of a small game that is played over and over. Out: forward and
backward time of each, and how many tokens were computed; both ways must have the same gradients in the run that is timed.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from selfplay.errors import RunError
from selfplay.launch.demonstrate import Teacher, demonstrations
from selfplay.registry import describe
from selfplay.scoring import action_counts, episode_segments, sequence_counts
from selfplay.scoring.packing import MicroBatch, num_distinct_tokens, plan_micro_batches
from selfplay.types import Segment

if TYPE_CHECKING:
    from torch import Tensor

    from selfplay.training.trainer import Trainer
    from selfplay.wire.messages import TrainStep

GROUP, TURNS, SHARED, TURN = 8, 3, 150, 40
"""Games of one motion; turns of a seat; tokens of rules and motion; tokens of what is seen and said in a turn."""
MAX_TOKENS = 4096
TOLERANCE = 1e-3


def debate_group(agents: Sequence[str], turns: int = TURNS) -> list[Segment]:
    """A group of debates of one motion: rules and motion are the same, everything that is said differs."""
    rng = random.Random(0)
    segments = []
    for agent in agents:
        start = [rng.randrange(5, 49_000) for _ in range(SHARED)]
        for game in range(GROUP):
            said = [rng.randrange(5, 49_000) for _ in range(TURN * turns)]
            mask = [0] * SHARED + ([0] * (TURN // 2) + [1] * (TURN // 2)) * turns
            segments.append(_segment(f"{game}.0", agent, start + said, mask, rng))
    return segments


def kuhn_batch(folder: Path, num: int) -> list[Segment]:
    """Kuhn poker by random players: few different games, many times."""
    from selfplay.policy.chat import HfChat

    spec, rng = describe("kuhn-poker-v0", {}), random.Random(0)
    episodes = demonstrations(spec, {}, teacher=Teacher("random"), num=num, seed=0, chat=HfChat(str(folder)))
    whole = [s for e in episodes for s in episode_segments(e, dict.fromkeys(spec.seats, 1.0))]
    return [_segment(s.episode_id, s.agent, s.ids, s.mask, rng) for s in whole]


def passes(trainer: Trainer, segments: Sequence[Segment]) -> tuple[TrainStep, TrainStep]:
    """The same step as tries, and as rows of whole segments: (shared, whole)."""
    (shared,) = plan_micro_batches(segments, ranks=1, max_tokens=MAX_TOKENS)
    return _message(trainer, segments, shared), _message(trainer, segments, _whole_rows(segments))


def require_same(shared: dict[str, Tensor], whole: dict[str, Tensor], tolerance: float = TOLERANCE) -> None:
    """Raise `RunError` unless both have the same gradients: a faster wrong one is no result."""
    for agent, gradient in whole.items():
        off = float((shared[agent] - gradient).norm() / gradient.norm())
        if not off <= tolerance:
            raise RunError(
                f"gradients of {agent} differ between a trie and whole segments by {off:.1e}, at most {tolerance}"
            )


def tokens(segments: Sequence[Segment]) -> tuple[int, int]:
    """(tokens, distinct tokens)."""
    return sum(len(s.ids) for s in segments), num_distinct_tokens(segments)


def _message(trainer: Trainer, segments: Sequence[Segment], rows: tuple[MicroBatch, ...]) -> TrainStep:
    from selfplay.wire.messages import TrainStep

    agents = tuple(sorted({s.agent for s in segments}))
    unknown = set(agents) - trainer.optimizers.keys()
    if unknown:
        raise RunError(f"the trainer does not have {sorted(unknown)}")
    return TrainStep(
        request=0, step=0, agents=agents, micro_batches=rows, num_actions=action_counts(segments, agents),
        num_sequences=sequence_counts(segments, agents),
    )  # fmt: skip


def _whole_rows(segments: Sequence[Segment]) -> tuple[MicroBatch, ...]:
    """Rows of at most `MAX_TOKENS` tokens, in order."""
    rows: list[list[Segment]] = [[]]
    for segment in sorted(segments, key=lambda s: s.agent):
        if rows[-1] and sum(len(s.ids) for s in rows[-1]) + len(segment.ids) > MAX_TOKENS:
            rows.append([])
        rows[-1].append(segment)
    return tuple(tuple(row) for row in rows)


def _segment(episode: str, agent: str, ids: Sequence[int], mask: Sequence[int], rng: random.Random) -> Segment:
    advantage = rng.choice((-1.0, 1.0))
    return Segment(
        episode_id=episode, agent=agent, seat=agent, ids=tuple(ids), mask=tuple(mask), versions=(0, 0),
        logprobs=tuple(m * -rng.uniform(9.0, 13.0) for m in mask), advantages=tuple(m * advantage for m in mask),
    )  # fmt: skip
