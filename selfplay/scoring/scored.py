"""From scores to what the trainer sees: rewards before the advantages, turn rewards and teachers after them.

    reward of a seat     Σ weight · reward of each scorer            (the environment's own when no scorer is set)
    turn t of a seat     advantage + Σ weight · its turn reward
    token                advantage + Σ weight · (log π_teacher − log μ)

The last line is on-policy distillation: the policy gradient with these advantages descends the reverse divergence
KL(π ‖ teacher) of what was sampled, token by token (Lu and Thinking Machines Lab, 2025, "On-Policy Distillation").
μ is the distribution that was sampled from.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from selfplay.scoring.scorers import Scores
from selfplay.scoring.segments import Advantage
from selfplay.types import Episode, Segment

Weighted = Sequence[tuple[Scores, float]]
"""What each scorer said, and its weight."""


def rewarded(episode: Episode, scores: Weighted) -> Episode:
    """The episode with the rewards its scorers gave; a seat that no scorer rewarded gets 0. Unchanged without scorers."""
    if not scores:
        return episode
    rewards = {seat: sum(w * s.rewards.get(seat, 0.0) for s, w in scores) for seat in episode.rewards}
    return msgspec.structs.replace(episode, rewards=rewards)


def with_turn_rewards(episode: Episode, advantages: Mapping[str, Advantage], scores: Weighted) -> dict[str, Advantage]:
    """Advantages per seat, per turn where a scorer rewarded turns."""
    out = dict(advantages)
    for seat, advantage in advantages.items():
        given = [(s.turn_rewards[seat], w) for s, w in scores if seat in s.turn_rewards]
        if given:
            num = sum(t.seat == seat for t in episode.turns)
            plain = [float(advantage)] * num if isinstance(advantage, int | float) else list(advantage)
            out[seat] = [a + sum(w * rewards[t] for rewards, w in given) for t, a in enumerate(plain)]
    return out


def with_teachers(segments: Sequence[Segment], scores: Weighted) -> list[Segment]:
    """The segments of one episode with what teachers say added to each action's advantage."""
    out = list(segments)
    for said, weight in scores:
        for seat, logprobs in said.teacher_logprobs.items():
            at = 0
            for i, segment in enumerate(out):
                if segment.seat == seat:
                    out[i] = _taught(segment, logprobs[at : at + segment.num_actions], weight)
                    at += segment.num_actions
    return out


def _taught(segment: Segment, teacher: Sequence[float], weight: float) -> Segment:
    left = iter(teacher)
    advantages = tuple(
        a + weight * (next(left) - mu) if m else a
        for a, mu, m in zip(segment.advantages, segment.logprobs, segment.mask, strict=True)
    )
    return msgspec.structs.replace(segment, advantages=advantages)
