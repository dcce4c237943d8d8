"""From a match to the players at its table."""

from __future__ import annotations

import random

import msgspec

from selfplay.agent import Player, PlayerContext, PolicyClient, Sampling
from selfplay.environment import Environment
from selfplay.registry import load_agent
from selfplay.types import Match, derive_seed


def sit_down(
    match: Match, policy: PolicyClient | None, sampling: Sampling, environment: Environment | None = None
) -> dict[str, Player]:
    """One player per seat, made by the agent kind the match names, each with a random generator of its own.

    With ``environment``, ``sampling.max_tokens`` of 0 means what it declares for a move. Raises `UserError` for an unknown
    agent kind or option.
    """
    if environment is not None and sampling.max_tokens == 0:
        sampling = msgspec.structs.replace(sampling, max_tokens=environment.max_move_tokens)
    return {
        a.seat: load_agent(a.player)(
            PlayerContext(
                assignment=a,
                episode_id=match.episode_id,
                rng=random.Random(derive_seed(match.seed, a.seat)),
                policy=policy,
                sampling=sampling,
                env_id=match.env,
                options=a.options,
            )
        )
        for a in match.seats
    }
