"""The random player: a uniform legal move; where any text is a move, what the game suggests or a canned sentence."""

from __future__ import annotations

from selfplay.agent import Answer, Decision, PlayerContext
from selfplay.registry.parameters import check_values

_SUBJECTS = ("Experience", "Common sense", "The evidence", "History", "Fairness", "Every honest observer")
_VERBS = ("speaks for", "supports", "confirms", "demands", "leads to", "cannot get around")
_OBJECTS = ("my side", "this view", "what I say", "this conclusion", "our position", "the choice I defend")


class RandomPlayer:
    """Draws from its seat's own generator: the same match gives the same moves. No options."""

    def __init__(self, context: PlayerContext) -> None:
        check_values("agent kind random", (), context.options)
        self._rng = context.rng

    async def decide(self, decision: Decision) -> Answer:
        if decision.legal_moves is not None:
            return Answer(text=self._rng.choice(decision.legal_moves))
        if decision.suggestions:
            return Answer(text=self._rng.choice(decision.suggestions))
        return Answer(text=" ".join(self._rng.choice(words) for words in (_SUBJECTS, _VERBS, _OBJECTS)) + ".")

    async def close(self) -> None:
        """Nothing is held."""
