"""Near-equilibrium play of any small game: the whole game is solved by CFR+ when the first player of that kind sits down."""

from __future__ import annotations

import functools

from selfplay.agent import Answer, Decision, PlayerContext
from selfplay.errors import UserError
from selfplay.evaluation.cfr import cfr_plus
from selfplay.evaluation.tree import build_tree
from selfplay.registry.parameters import Parameter, check_values

OPTIONS = (Parameter(name="iterations", kind="int", default=300),)
Past = tuple[tuple[str, str], ...]
Rows = dict[Past, tuple[tuple[str, ...], tuple[float, ...]]]


class CfrPlayer:
    """Draws from the average policy of CFR+ on the environment with its default parameters. Option ``iterations``."""

    def __init__(self, context: PlayerContext) -> None:
        options = check_values("agent kind cfr", OPTIONS, context.options)
        if not 1 <= int(options["iterations"]) <= 100_000:
            raise UserError(f"agent kind cfr: iterations is {options['iterations']}; it must be 1 to 100000")
        self._policy = _solved(context.env_id, int(options["iterations"]))
        self._env_id, self._rng = context.env_id, context.rng
        self._past: tuple[tuple[str, str], ...] = ()

    async def decide(self, decision: Decision) -> Answer:
        rows = self._policy.get(decision.view, {})
        known = next(iter(rows.values())) if len(rows) == 1 else rows.get(self._past)
        if known is None:
            raise UserError(f"cfr plays {self._env_id} with its default parameters only; this is another game")
        move = self._rng.choices(*known)[0]
        self._past = (*self._past, (decision.view, move))
        return Answer(text=move)

    async def close(self) -> None:
        """Nothing is held."""


@functools.cache
def _solved(env_id: str, iterations: int) -> dict[str, Rows]:
    """View → what the seat saw and did before → moves and their probabilities. Most views tell all of that themselves."""
    tree = build_tree(env_id)
    out: dict[str, Rows] = {}
    for state, row in zip(tree.states, cfr_plus(tree, iterations), strict=True):
        past = tuple((d.view, m) for d, m in state.past)
        out.setdefault(state.decision.view, {})[past] = (state.moves, tuple(row))
    return out
