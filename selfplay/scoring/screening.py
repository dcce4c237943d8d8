"""Which finished episodes may not be trained on, and why: they are put aside, counted by reason, and the run goes on.

In: an episode as it arrived and what its environment declares. Out: nothing when it is sound, else a short reason for
the ledger and the details for the log. Runs before an episode reaches the buffer, a baseline or a rating.
"""

from __future__ import annotations

import math

import msgspec

from selfplay.types import Episode, Turn, episode_faults

REWARD_SLACK = 1e-6
"""How far float arithmetic may carry a reward outside its declared range."""


class Unusable(msgspec.Struct, frozen=True, kw_only=True):
    """Why an episode is put aside: ``reason`` is a class of fault, ``detail`` names seats, turns and numbers."""

    reason: str
    detail: str


def why_unusable(episode: Episode, reward_range: tuple[float, float] = (-math.inf, math.inf)) -> Unusable | None:
    """None for an episode that can be stored and trained on.

    The range holds for results of play; what forfeits cost is declared apart from it.
    """
    bad_rewards = {seat: r for seat, r in episode.rewards.items() if not math.isfinite(r)}
    if bad_rewards:
        return Unusable(reason="non-finite reward", detail=f"rewards {bad_rewards}")
    outside = {s: r for s, r in episode.rewards.items() if not _within(r, reward_range)}
    if outside and episode.ended != "forfeit":
        return Unusable(
            reason="reward out of range", detail=f"rewards {outside}, the environment declares {list(reward_range)}"
        )
    for i, turn in enumerate(episode.turns):
        if not all(math.isfinite(x) for x in turn.logprobs):
            return Unusable(reason="non-finite logprob", detail=f"turn {i}, seat {turn.seat}")
    faults = episode_faults(episode) or _untrainable(episode)
    return Unusable(reason="inconsistent record", detail="; ".join(faults[:3])) if faults else None


def _within(reward: float, reward_range: tuple[float, float]) -> bool:
    low, high = reward_range
    return low - REWARD_SLACK <= reward <= high + REWARD_SLACK


def _untrainable(episode: Episode) -> list[str]:
    """What `episode_segments` would raise for, in words."""
    faults = []
    for assignment in episode.match.seats:
        if not assignment.trained:
            continue
        has_context = False
        for i, turn in enumerate(t for t in episode.turns if t.seat == assignment.seat):
            has_context = bool(turn.prompt_ids) or (has_context and not turn.fork)
            faults += [
                f"seat {assignment.seat}, turn {i} of the seat: {fault}" for fault in _unusable_turn(turn, has_context)
            ]
    return faults


def _unusable_turn(turn: Turn, has_context: bool) -> list[str]:
    if not turn.sampled_ids:
        return []
    faults = [] if has_context else ["tokens were sampled from an empty context"]
    if not any(span.end > span.start for span in turn.spans):
        faults.append("nothing says which version sampled the tokens")
    return faults
