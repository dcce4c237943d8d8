"""Deal or no deal: ask for what is worth most, and give way offer by offer."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Mapping

from selfplay.agent import Decision

_COUNT = re.compile(r"(\d) (?:book|hat|ball)s?")
_VALUE = re.compile(r"(?:book|hat|ball) (\d+)")
_OFFER = re.compile(r"(you|other) keeps? (\d{3})")
TOTAL = 10


def _conceding(first: float, last: float) -> Callable[[Decision, random.Random], str]:
    """Ask for ``first`` of the total at first and ``last`` in the end; accept what reaches what would be asked next."""

    def strategy(decision: Decision, rng: random.Random) -> str:
        items, _, rest = decision.view.partition("Worth to you each: ")
        worth, _, offers = rest.partition("Offers so far: ")
        counts, values = ([int(n) for n in p.findall(t)] for p, t in ((_COUNT, items), (_VALUE, worth)))
        said = _OFFER.findall(offers)
        wanted = TOTAL * (first + (last - first) * min(1.0, len(said) / 6))
        if said and said[-1][0] == "other":
            mine = sum((n - int(k)) * v for n, k, v in zip(counts, said[-1][1], values, strict=True))
            if mine >= wanted:
                return "accept"
        splits = [m for m in decision.legal_moves or () if m != "accept"]
        gains = {m: sum(int(k) * v for k, v in zip(m, values, strict=True)) for m in splits}
        enough = [m for m in splits if gains[m] >= wanted]
        fewest = min(sum(map(int, m)) for m in enough)
        return rng.choice([m for m in enough if sum(map(int, m)) == fewest])

    return strategy


STRATEGIES: Mapping[str, Callable[[Decision, random.Random], str]] = {
    "fair": _conceding(0.8, 0.5),
    "tough": _conceding(1.0, 0.7),
}
