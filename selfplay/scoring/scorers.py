"""The scorer seam: what a finished episode is worth, said by whoever was asked, beside generation.

    Episode ─► scorers (each with its own concurrency) ─► Scores ─► advantages ─► segments

An entry point of ``selfplay.scorers`` names a callable that takes a `ScorerConfig` and returns a `Scorer`. Scorers may ask
served models through their `ScorerContext`; they never see the trainer. A scorer runs in the controller's own loop: one that
computes must do so in a thread.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Protocol, runtime_checkable

import msgspec

from selfplay.config.schema import Config, ScorerConfig
from selfplay.environment import JuryQuestion
from selfplay.errors import ConfigError, UserError
from selfplay.registry import find_entry, load_entry
from selfplay.registry.entries import SCORERS
from selfplay.types import Episode, PolicyVersion

TEACHER = "teacher"


class Scores(msgspec.Struct, frozen=True, kw_only=True):
    """What one scorer says of one episode; whatever it leaves empty it says nothing about."""

    rewards: dict[str, float] = {}
    """Seat → reward of the whole game."""
    turn_rewards: dict[str, tuple[float, ...]] = {}
    """Seat → reward of each of its turns (illegal tries included), in order."""
    teacher_logprobs: dict[str, tuple[float, ...]] = {}
    """Seat → a teacher's log-probability of each token the seat sampled, all its turns one after another."""


class ScorerContext(Protocol):
    """The way from a scorer to served models. ``who``: a lineage (its current version), ``agent@n``, or ``base``."""

    async def logprobs(self, who: str, ids: Sequence[int]) -> tuple[float, ...]:
        """Teacher-forced log-probabilities [T−1] of ``ids[1:]`` given what is before each, at temperature 1."""
        ...

    async def choose(self, who: str, question: JuryQuestion) -> Mapping[str, float]:
        """Probability of each label of ``question``."""
        ...


@runtime_checkable
class Scorer(Protocol):
    """Scores one episode at a time; called for many at once."""

    async def score(self, episode: Episode, context: ScorerContext) -> Scores:
        """What this scorer says of ``episode``."""
        ...


class Panel(msgspec.Struct, frozen=True):
    """The scorers of a run by name, with their settings."""

    scorers: dict[str, tuple[Scorer, ScorerConfig]]

    def is_teacher(self, name: str) -> bool:
        """Whether this scorer reads token ids."""
        return (self.scorers[name][1].kind or name) == TEACHER

    def teachers(self) -> tuple[PolicyVersion, ...]:
        """Frozen versions that scorers ask; the engines must have them."""
        asked = [config.agent for _, config in self.scorers.values()]
        return tuple(sorted({PolicyVersion.parse(agent) for agent in asked if "@" in agent}))


def load_panel(config: Config) -> Panel:
    """The scorers that ``config.scorers`` names; none when it is empty: the environment's reward alone.

    Raises `UnknownNameError` with the nearest kinds, or `UserError` for one that cannot be made.
    """
    return Panel({name: (_load(name, c, config), c) for name, c in sorted(config.scorers.items())})


def _load(name: str, config: ScorerConfig, run: Config) -> Scorer:
    entry = find_entry(SCORERS, config.kind or name)
    if entry.id == TEACHER and run.rollout.temperature != 1.0:
        raise ConfigError(
            f"scorers.{name}: a teacher's probabilities are those of temperature 1, and rollout.temperature="
            f"{run.rollout.temperature:g}: set it to 1"
        )
    if "@" in config.agent and config.model:
        raise ConfigError(f"scorers.{name}: agent={config.agent} is a version of this run, not of model {config.model}")
    make = load_entry(entry)
    scorer = make(config) if callable(make) else None
    if not isinstance(scorer, Scorer):
        raise UserError(f"scorer {entry.id!r} of {entry.source} ({entry.target}) needs the method score")
    return scorer


def scores_fault(scores: Scores, episode: Episode) -> str:
    """What is wrong with a scorer's answer; empty when it fits the episode."""
    seats = {s.seat for s in episode.match.seats}
    for what in (scores.rewards, scores.turn_rewards, scores.teacher_logprobs):
        if unknown := set(what) - seats:
            return f"it scores the seat {min(unknown)!r}, the episode has {', '.join(sorted(seats))}"
    for seat in seats:
        turns = [t for t in episode.turns if t.seat == seat]
        per_turn, per_token = scores.turn_rewards.get(seat), scores.teacher_logprobs.get(seat)
        if per_turn is not None and len(per_turn) != len(turns):
            return f"seat {seat} has {len(turns)} turns but {len(per_turn)} turn rewards"
        num_tokens = sum(len(t.sampled_ids) for t in turns)
        if per_token is not None and len(per_token) != num_tokens:
            return f"seat {seat} sampled {num_tokens} tokens but there are {len(per_token)} teacher logprobs"
    numbers = [*scores.rewards.values(), *(x for v in scores.turn_rewards.values() for x in v)]
    numbers += [x for v in scores.teacher_logprobs.values() for x in v]
    return "" if all(math.isfinite(x) for x in numbers) else "a score is not a finite number"
