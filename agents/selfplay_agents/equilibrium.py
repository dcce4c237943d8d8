"""Equilibrium play for small solved games of hidden information: two-player Kuhn poker.

The first seat has a one-parameter family of equilibria (Kuhn, 1950): with J it bets with probability alpha, with K with
3 alpha, and with Q it passes and calls with alpha + 1/3, for alpha in [0, 1/3]. The second seat has one equilibrium.
"""

from __future__ import annotations

import re

from selfplay.agent import Answer, Decision, PlayerContext
from selfplay.errors import ConfigError, UserError
from selfplay.registry.parameters import Parameter, check_values

_VIEW = re.compile(r"Card: ([JQK])\. History: ([a-z, ]{1,40})\.")


class EquilibriumPlayer:
    """Plays a Nash equilibrium. Option ``alpha`` in [0, 1/3]: how often the first seat bluffs."""

    def __init__(self, context: PlayerContext) -> None:
        options = check_values(
            "agent kind equilibrium", (Parameter(name="alpha", kind="float", default=0.2),), context.options
        )
        if re.sub(r"-v\d+\Z", "", context.env_id) != "kuhn-poker":
            raise UserError(f"equilibrium cannot play {context.env_id!r}; it knows kuhn-poker")
        self._alpha, self._rng = float(options["alpha"]), context.rng
        if not 0.0 <= self._alpha <= 1 / 3:
            raise ConfigError(f"agent kind equilibrium: alpha is {self._alpha:g}; it must be between 0 and 1/3")

    async def decide(self, decision: Decision) -> Answer:
        found = _VIEW.search(decision.view)
        if found is None or "players" in decision.rules:
            raise UserError("equilibrium plays kuhn-poker with two players only; this is another game")
        history = () if found[2] == "none" else tuple(found[2].split(", "))
        p = bet_probability(history, found[1], self._alpha)
        return Answer(text="bet" if self._rng.random() < p else "pass")

    async def close(self) -> None:
        """Nothing is held."""


def bet_probability(history: tuple[str, ...], card: str, alpha: float) -> float:
    """Probability to bet or call with ``card`` after ``history`` in the equilibrium of parameter ``alpha``."""
    table = {
        (): {"J": alpha, "Q": 0.0, "K": 3 * alpha},
        ("pass",): {"J": 1 / 3, "Q": 0.0, "K": 1.0},
        ("bet",): {"J": 0.0, "Q": 1 / 3, "K": 1.0},
        ("pass", "bet"): {"J": 0.0, "Q": alpha + 1 / 3, "K": 1.0},
    }
    return table[history][card]
