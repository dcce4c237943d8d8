"""The iterated prisoner's dilemma: the standard game of simultaneous moves and mixed motives (Axelrod, 1984)."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence

from selfplay.environment import Environment, Forfeit, Outcome
from selfplay.errors import ConfigError
from selfplay.types import Scalar

COOPERATE, DEFECT = "cooperate", "defect"
PAYOFFS = {
    (COOPERATE, COOPERATE): (3, 3),
    (COOPERATE, DEFECT): (0, 5),
    (DEFECT, COOPERATE): (5, 0),
    (DEFECT, DEFECT): (1, 1),
}


class PrisonersDilemma(Environment):
    """Each round both seats say ``cooperate`` or ``defect`` at once; neither sees the other's choice of the round.

    Points per round: both cooperate 3 each, both defect 1 each, a lone defector 5 and the other 0. After each round more
    of the game follows with probability ``continuation`` (1: exactly ``rounds`` rounds), at most ``rounds`` in all, so that
    no seat need know which round is the last; the number of rounds is drawn from the seed. With ``noise`` a choice turns
    into the other one with that probability, and both seats are shown what was played.

    The reward of a seat is its mean points per round, 0 to 5: the game is not zero-sum. The seat with more points wins;
    equal points are a draw. A seat that answers nothing legal twice forfeits: 0, and 3 for the other.
    """

    seats: Sequence[str] = ("player_0", "player_1")
    zero_sum = False
    reward_range = (0.0, 5.0)
    forfeit = Forfeit(retries=1, offender=0.0, others=3.0)
    max_move_tokens = 12
    presets: Mapping[str, Mapping[str, Scalar]] = {
        "one-shot": {"rounds": 1},
        "noisy": {"noise": 0.05},
        "open-ended": {"rounds": 30, "continuation": 0.9},
    }

    def __init__(self, rng: random.Random, rounds: int = 5, continuation: float = 1.0, noise: float = 0.0) -> None:
        super().__init__(rng)
        if not 1 <= rounds <= 200:
            raise ConfigError(f"rounds is {rounds}; it must be between 1 and 200")
        if not 0.0 <= continuation <= 1.0:
            raise ConfigError(f"continuation is {continuation:g}; it must be between 0 and 1")
        if not 0.0 <= noise <= 0.5:
            raise ConfigError(f"noise is {noise:g}; it must be between 0 and 0.5")
        self._rounds = 1
        while self._rounds < rounds and rng.random() < continuation:
            self._rounds += 1
        self._known_end, self._noise = (rounds if continuation == 1.0 else 0), noise
        self._played: list[tuple[str, str]] = []
        self.max_turns = 2 * rounds

    def rules(self, seat: str) -> str:
        length = f" There are {self._known_end} rounds." if self._known_end else ""
        return (
            "You play the prisoner's dilemma. Both choose at once. Both cooperate: 3 points each. Both defect: 1 each. "
            f"A lone defector gets 5, the other 0.{length} Answer with one word, cooperate or defect."
        )

    def to_move(self) -> Sequence[str]:
        return self.seats if len(self._played) < self._rounds else ()

    def view(self, seat: str) -> str:
        me = self.seats.index(seat)
        past = "; ".join(f"you {r[me]}, other {r[1 - me]}" for r in self._played) or "none"
        return f"Round {len(self._played) + 1}. Past rounds: {past}. Choose: cooperate, defect."

    def legal_moves(self, seat: str) -> Sequence[str]:
        return (COOPERATE, DEFECT)

    def step(self, moves: Mapping[str, str]) -> None:
        first, second = (self._heard(moves[s]) for s in self.seats)
        self._played.append((first, second))

    def outcome(self) -> Outcome:
        points = {s: sum(PAYOFFS[r][i] for r in self._played) for i, s in enumerate(self.seats)}
        best = max(points.values())
        leaders = tuple(s for s in self.seats if points[s] == best)
        cooperation = sum(r.count(COOPERATE) for r in self._played) / (2 * len(self._played))
        return Outcome(
            rewards={s: p / len(self._played) for s, p in points.items()},
            winners=leaders if len(leaders) == 1 else (),
            reason=f"{' to '.join(str(p) for p in points.values())} points in {len(self._played)} rounds",
            info={"cooperation": cooperation},
        )

    def private(self, seat: str) -> str:
        return ""  # nothing is hidden

    def transcript(self) -> str:
        return "\n".join(f"round {i}: {a}, {b}" for i, (a, b) in enumerate(self._played, 1))

    def _heard(self, move: str) -> str:
        if self._noise and self.rng.random() < self._noise:
            return DEFECT if move == COOPERATE else COOPERATE
        return move
