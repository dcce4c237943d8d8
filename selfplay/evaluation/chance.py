"""Chance as something that can be listed: a random generator whose draws are taken from a script.

In: code that draws from a `random.Random`. Out: every way its draws can fall, with the probability of each. A game that is
built on such a generator shows its whole tree of chance, with no word about it in the game.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator, Sequence
from fractions import Fraction
from typing import Any, TypeVar

from selfplay.errors import UserError

T = TypeVar("T")
MAX_DRAWS = 1_000
"""In one go, between two decisions: a hundred of them with two values each could not be listed either."""


class ListedRandom(random.Random):
    """Draws digits from ``script``; beyond its end every draw falls on its first value, and all draws are noted.

    Copies of a game share it. Integer draws (``randrange``, ``choice``, ``shuffle``, ``sample``, ``getrandbits`` and weighted
    ``choices``) can be listed; a draw from a continuum raises `UserError`.
    """

    def __init__(self) -> None:
        super().__init__(0)
        self.begin(())

    def begin(self, script: Sequence[int]) -> None:
        """Forget earlier draws; the next ones follow ``script``."""
        self._script = script
        self.drawn: list[tuple[int, tuple[float, ...]]] = []
        """(value, probabilities of all values) of each draw."""

    def draw(self, weights: Sequence[float]) -> int:
        """One draw among values 0..n−1 with these probabilities."""
        at = len(self.drawn)
        if at >= MAX_DRAWS:
            raise UserError(
                f"the game draws more than {MAX_DRAWS:,} times at once, perhaps again and again until something fits: its chance "
                "cannot be listed, so it has no exact evaluation"
            )
        value = self._script[at] if at < len(self._script) else next(i for i, w in enumerate(weights) if w > 0)
        self.drawn.append((value, tuple(weights)))
        return value

    def _randbelow(self, n: int) -> int:
        return self.draw((1.0 / n,) * n) if n > 1 else 0

    def getrandbits(self, k: int, /) -> int:
        """A k-bit number, each equally likely."""
        return self._randbelow(1 << k)

    def choices(
        self,
        population: Any,
        weights: Sequence[float | Fraction] | None = None,
        *,
        cum_weights: Sequence[float | Fraction] | None = None,
        k: int = 1,
    ) -> list[Any]:
        """As `random.Random.choices`."""
        n = len(population)
        if cum_weights is not None:
            weights = [float(b - a) for a, b in itertools.pairwise((0, *cum_weights))]
        masses = [float(w) for w in weights] if weights is not None else [1.0] * n
        total = sum(masses)
        return [population[self.draw([m / total for m in masses])] for _ in range(k)]

    def random(self) -> float:
        """Refused: there is no list of the reals in [0, 1)."""
        raise UserError(
            "the game draws a real number (random(), uniform(), gauss() or the like): its chance cannot be listed, so it has "
            "no exact evaluation; draw with choices(), randrange(), sample() or shuffle() instead"
        )

    def seed(self, *_: Any) -> None:
        """A script has no seed."""

    def __deepcopy__(self, _: dict[int, Any]) -> ListedRandom:
        return self

    def __reduce__(self) -> Any:
        raise TypeError("a scripted generator lives in one process")


def all_ways(rng: ListedRandom, act: Callable[[], T]) -> Iterator[tuple[float, T]]:
    """(probability, what ``act`` returned) for every way the draws inside ``act`` can fall; the probabilities sum to 1."""
    script: list[int] | None = []
    while script is not None:
        rng.begin(script)
        result = act()
        drawn, p = rng.drawn, 1.0
        for value, weights in drawn:
            p *= weights[value]
        yield p, result
        script = _following(drawn)


def _following(drawn: Sequence[tuple[int, tuple[float, ...]]]) -> list[int] | None:
    """The next script in order: the last draw that has a further possible value takes it."""
    for at in range(len(drawn) - 1, -1, -1):
        value, weights = drawn[at]
        for further in range(value + 1, len(weights)):
            if weights[further] > 0:
                return [v for v, _ in drawn[:at]] + [further]
    return None
