"""Exploitability of a player that shows no probabilities: asked many times at every information state.

The plug-in estimate is biased upwards, since a best response also exploits the noise of the samples. Two figures beside it say how
far: the bias at the estimate (a parametric bootstrap), and what an equilibrium player would show at as many samples. The bias is
largest near the equilibrium: an estimate at or below that second figure cannot be told from perfect play.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence

import msgspec

from selfplay.agent import PlayerContext, Sampling
from selfplay.errors import UserError
from selfplay.evaluation.cfr import cfr_plus
from selfplay.evaluation.solve import Solution, solve
from selfplay.evaluation.tree import GameTree, InfoState
from selfplay.registry import load_agent
from selfplay.types import Scalar, SeatAssignment, derive_seed

RESAMPLES = 20
CFR_ITERATIONS = 200


class SampledReport(msgspec.Struct, frozen=True, kw_only=True):
    """The plug-in estimate, how many answers per state it rests on, and how much too high such an estimate is."""

    env: str
    seats: tuple[str, ...]
    samples: int
    solution: Solution
    bias: float
    equilibrium_shows: float
    """Mean plug-in NashConv of a near-equilibrium (CFR+) sampled as often."""
    policy: tuple[tuple[float, ...], ...]


async def sampled_exploitability(
    tree: GameTree, player: str, options: Mapping[str, Scalar], *, samples: int, seed: int = 0
) -> SampledReport:
    """Ask ``player`` ``samples`` times at every information state. Raises `UserError` for one that answers illegally."""
    policy = [await _ask(tree, state, player, dict(options), samples, seed) for state in tree.states]
    solution, rng = solve(tree, policy), random.Random(derive_seed(seed, "bias"))
    perfect = cfr_plus(tree, CFR_ITERATIONS)
    return SampledReport(
        env=tree.env_id, seats=tree.seats, samples=samples, solution=solution,
        bias=_shown(tree, policy, samples, rng) - solution.nash_conv,
        equilibrium_shows=_shown(tree, perfect, samples, rng), policy=tuple(tuple(row) for row in policy),
    )  # fmt: skip


def _shown(tree: GameTree, policy: Sequence[Sequence[float]], samples: int, rng: random.Random) -> float:
    """Mean NashConv of what ``samples`` answers per state of ``policy`` look like."""
    again = [solve(tree, [_resample(row, samples, rng) for row in policy]).nash_conv for _ in range(RESAMPLES)]
    return sum(again) / RESAMPLES


def _resample(row: Sequence[float], samples: int, rng: random.Random) -> list[float]:
    drawn = rng.choices(range(len(row)), row, k=samples)
    return [drawn.count(i) / samples for i in range(len(row))]


async def _ask(
    tree: GameTree, state: InfoState, player: str, options: dict[str, Scalar], samples: int, seed: int
) -> list[float]:
    counts = dict.fromkeys(state.moves, 0)
    meant = {way: move for move, ways in zip(state.moves, state.answers, strict=True) for way in ways}
    for k in range(samples):
        rng = random.Random(derive_seed(seed, state.index, k))
        seat = SeatAssignment(seat=state.decision.seat, player=player, agent=player, options=options)
        mind = load_agent(player)(
            PlayerContext(
                assignment=seat,
                episode_id="0.0",
                rng=rng,
                policy=None,
                sampling=Sampling(),
                env_id=tree.env_id,
                options=options,
            )
        )
        text = (await mind.decide(state.decision)).text
        await mind.close()
        if text not in meant:
            raise UserError(f"{player} answered {text[:60]!r}, which is no legal move of {', '.join(state.moves)}")
        counts[meant[text]] += 1
    return [counts[m] / samples for m in state.moves]
