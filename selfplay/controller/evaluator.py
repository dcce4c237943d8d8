"""What a run knows of its own strength while it trains: exact exploitability, and games against players that never change.

    every eval.every steps:  information states ──► policy server ──► probabilities of all moves ──► NashConv of
                             the versions as they are, as played (illegal answers included), and of all past selves on average

The whole game tree is walked once, at the start; a game that is too large for that, or is played by others than served
models, is refused there, unless ``eval.exact`` is off. Games against anchors are in `controller.anchors`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from selfplay.agent import Message
from selfplay.config import Config
from selfplay.controller.anchors import AnchorGames
from selfplay.controller.policy_link import PolicyLink
from selfplay.errors import ConfigError, UserError
from selfplay.evaluation import GameTree, build_tree, exploitability, solve
from selfplay.evaluation.average import PolicyAverage
from selfplay.evaluation.exploit import renormalised
from selfplay.pool import EpisodeResult, FailedResult
from selfplay.types import BASE, PolicyVersion, SeatAssignment


def plan_evaluation(config: Config, seats: Sequence[SeatAssignment]) -> GameTree | None:
    """The game's tree where ``eval.every`` asks for it; raises `ConfigError` for what cannot be measured."""
    evaluation = config.eval
    if not evaluation.every:
        return None
    if not evaluation.exact:
        if not evaluation.anchors:
            raise ConfigError(
                f"eval.every={evaluation.every} with eval.exact=false measures nothing: name players in eval.anchors, or set eval.every=0"
            )
        return None
    _check_seats(seats)
    try:
        return build_tree(config.env, dict(config.env_params))
    except UserError as e:
        raise ConfigError(
            f"eval.every={evaluation.every}: {e}; eval.exact=false with eval.anchors measures by games instead"
        ) from None


class Evaluator:
    """Measures the versions that sit at the table of ``seats``."""

    def __init__(
        self, tree: GameTree, seats: Sequence[SeatAssignment], link: PolicyLink, *, timeout_s: float,
        totals: Sequence[float] = (),
    ) -> None:  # fmt: skip
        """``totals``: of `PolicyAverage`, to go on with."""
        self._tree, self._seats, self._link, self._timeout_s = tree, tuple(seats), link, timeout_s
        self._average = PolicyAverage(tree, totals)

    async def evaluate(self, current: Mapping[str, int], step: int) -> dict[str, float]:
        """Figures of the current versions. The average weighs a version by its step, so that early play counts for little
        (linear averaging, as in CFR+: Tammelin 2014)."""
        report = await exploitability(
            self._tree,
            _Scorer(self._link, self._seats, current, self._timeout_s),
            options=dict(self._seats[0].options),
            variants=False,
        )
        policy = renormalised([s.masses for s in report.states])
        self._average.add(policy, float(max(step, 1)))
        return {
            "nash_conv": report.renormalised.nash_conv,
            "nash_conv_as_played": report.as_played.nash_conv,
            "average_nash_conv": solve(self._tree, self._average.policy()).nash_conv,
            "legal_mass": report.legal_mass,
            "min_legal_mass": report.min_legal_mass,
        }

    def totals(self) -> tuple[float, ...]:
        """What a checkpoint keeps."""
        return self._average.totals()


class Evaluations:
    """All that ``eval.every`` asks for."""

    def __init__(self, exact: Evaluator | None, anchors: AnchorGames | None) -> None:
        self._exact, self._anchors = exact, anchors

    async def evaluate(self, current: Mapping[str, int], step: int) -> dict[str, float]:
        """Figures of the current versions; none where nothing is measured."""
        found = await self._exact.evaluate(current, step) if self._exact is not None else {}
        return found | (await self._anchors.play() if self._anchors is not None else {})

    def take(self, result: EpisodeResult | FailedResult) -> bool:
        """Whether a result of the pool is of an evaluation and was kept."""
        return self._anchors is not None and self._anchors.take(result)

    def totals(self) -> tuple[float, ...]:
        """What a checkpoint keeps."""
        return self._exact.totals() if self._exact is not None else ()


class _Scorer:
    """Asks whoever sits at a seat."""

    def __init__(
        self, link: PolicyLink, seats: Sequence[SeatAssignment], current: Mapping[str, int], timeout_s: float
    ) -> None:
        self._link, self._timeout_s = link, timeout_s
        self._versions = [_version(s, current) for s in seats]

    async def __call__(self, seat: int, messages: Sequence[Message], answers: Sequence[str]) -> Sequence[float]:
        return await self._link.score(self._versions[seat], messages, answers, self._timeout_s)


def _version(seat: SeatAssignment, current: Mapping[str, int]) -> PolicyVersion | None:
    if seat.agent == BASE:
        return None
    return PolicyVersion(seat.agent, seat.pin if isinstance(seat.pin, int) else current[seat.agent])


def _check_seats(seats: Sequence[SeatAssignment]) -> None:
    """Model players at every seat, with the same options."""
    others = [f"{s.seat}: {s.player}" for s in seats if s.player != "llm"]
    if others:
        raise ConfigError(
            f"eval.every measures the exploitability of served models, and {', '.join(others)} is not one: set eval.exact=false and eval.anchors, or eval.every=0"
        )
    if any(s.options != seats[0].options for s in seats):
        raise ConfigError("eval.every needs the same options at every seat: set eval.exact=false, or the options alike")
