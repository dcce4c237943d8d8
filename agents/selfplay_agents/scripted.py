"""Well-known fixed strategies, one or several per game, chosen with the option ``strategy``.

A strategy is a function from what the seat is shown (and its own generator) to a move; like every player it never sees
the game object. A game without strategies is refused by name.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Mapping

from selfplay.agent import Answer, Decision, PlayerContext
from selfplay.errors import ConfigError, UserError
from selfplay.registry.parameters import Parameter, check_values
from selfplay_agents.strategies import (
    connect_four,
    liars_dice,
    negotiation,
    prisoners_dilemma,
    signalling,
    taboo,
    werewolf,
)

Strategy = Callable[[Decision, random.Random], str]

STRATEGIES: Mapping[str, Mapping[str, Strategy]] = {
    "connect-four": connect_four.STRATEGIES,
    "liars-dice": liars_dice.STRATEGIES,
    "negotiation": negotiation.STRATEGIES,
    "prisoners-dilemma": prisoners_dilemma.STRATEGIES,
    "signalling": signalling.STRATEGIES,
    "taboo": taboo.STRATEGIES,
    "werewolf": werewolf.STRATEGIES,
}
"""Game → strategy → function; the first strategy of a game is its default."""


class ScriptedPlayer:
    """Plays a fixed strategy. Option ``strategy``: which one (empty: the game's first)."""

    def __init__(self, context: PlayerContext) -> None:
        options = check_values(
            "agent kind scripted", (Parameter(name="strategy", kind="str", default=""),), context.options
        )
        game = re.sub(r"-v\d+\Z", "", context.env_id)
        if game not in STRATEGIES:
            raise UserError(f"scripted cannot play {context.env_id!r}; it knows {', '.join(sorted(STRATEGIES))}")
        known = STRATEGIES[game]
        name = str(options["strategy"]) or next(iter(known))
        if name not in known:
            raise ConfigError(f"agent kind scripted: {game} has no strategy {name!r}; it has {', '.join(known)}")
        self._strategy, self._rng = known[name], context.rng

    async def decide(self, decision: Decision) -> Answer:
        return Answer(text=self._strategy(decision, self._rng))

    async def close(self) -> None:
        """Nothing is held."""
