"""The random player: a uniform legal move; where any text is a move, what the game suggests or a canned sentence."""

from __future__ import annotations

from selfplay.agent import Answer, Decision, PlayerContext
from selfplay.errors import ConfigError
from selfplay.registry.parameters import Parameter, check_values
from selfplay.types import derive_seed

OPTIONS = (Parameter(name="habit", kind="float", default=0.0),)

_SUBJECTS = ("Experience", "Common sense", "The evidence", "History", "Fairness", "Every honest observer")
_VERBS = ("speaks for", "supports", "confirms", "demands", "leads to", "cannot get around")
_OBJECTS = ("my side", "this view", "what I say", "this conclusion", "our position", "the choice I defend")


class RandomPlayer:
    """Draws from its seat's own generator: the same match gives the same moves.

    Option ``habit`` in [0, 1]: how often it makes, in a position, the one move that it always makes there, drawn for each view
    once and for all. It plays no better for that, but whoever imitates it must look at the position.
    """

    def __init__(self, context: PlayerContext) -> None:
        self._habit = float(check_values("agent kind random", OPTIONS, context.options)["habit"])
        if not 0.0 <= self._habit <= 1.0:
            raise ConfigError(f"agent kind random: habit is {self._habit:g}; it must be between 0 and 1")
        self._rng = context.rng

    async def decide(self, decision: Decision) -> Answer:
        if legal := decision.legal_moves:
            if self._habit and self._rng.random() < self._habit:
                return Answer(text=legal[derive_seed("habit", decision.view) % len(legal)])
            return Answer(text=self._rng.choice(legal))
        if decision.suggestions:
            return Answer(text=self._rng.choice(decision.suggestions))
        return Answer(text=" ".join(self._rng.choice(words) for words in (_SUBJECTS, _VERBS, _OBJECTS)) + ".")

    async def close(self) -> None:
        """Nothing is held."""
