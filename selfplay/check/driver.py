"""Random games of one environment, one round at a time, with somebody looking on.

In: an id, parameters, a number. Out: what every seat was told and did, as lines that can be compared. Game ``n`` is the
very game that ``selfplay play ID --players random --seed n`` plays.
"""

from __future__ import annotations

import contextlib
import copy
import hashlib
import random
from collections.abc import Callable, Coroutine, Mapping
from typing import Any, TypeVar

from selfplay.agent import Decision, Player, Sampling
from selfplay.environment import JuryQuestion, Outcome
from selfplay.errors import EnvironmentFault, IllegalMove
from selfplay.play import sit_down
from selfplay.play.table import Table
from selfplay.registry import Isolation, load_environment, make_environment
from selfplay.types import Match, Scalar, SeatAssignment, derive_seed

T = TypeVar("T")


class RandomGame:
    """One game; `advance` plays a round. After the end ``ended`` says how, and ``outcome`` is there if it was natural."""

    def __init__(self, env_id: str, params: Mapping[str, Scalar], number: int, max_rounds: int | None = None) -> None:
        self.env_id, self.params, self.number = env_id, params, number
        self.seed = derive_seed(number, "play", 0)
        self._construction = Isolation(
            derive_seed(self.seed, "construction"), numpy=load_environment(env_id).global_random
        )
        self.environment = make_environment(env_id, params, self.seed, self._construction)
        self.table = Table(env_id, self.environment, self.seed)
        self.players = self._players()
        self.lines: list[str] = []
        self.num_turns = 0
        self._rounds_left = max_rounds if max_rounds is not None else 1 << 60
        self.ended = ""
        self.outcome: Outcome | None = None
        self.decisions: tuple[Decision, ...] = ()
        self._moves: dict[str, str] | None = None

    def open(self) -> tuple[Decision, ...]:
        """Apply the last round's moves; the decisions of the next, empty when the game is over (`ended` is set then)."""
        self.decisions = self.table.open_round(self._moves)
        for d in self.decisions:
            rules = f" {d.rules!r}" if self.num_turns < len(self.players) else ""
            self.lines.append(f"{d.round} {d.seat}:{rules} {d.view!r} {d.legal_moves!r}")
        if not self.decisions:
            self._finish()
        elif self._rounds_left == 0:
            self._end("cut", f"after {self.num_turns} turns")
        elif self.num_turns >= self.environment.max_turns:
            self._end("truncated", f"after {self.num_turns} turns")
        return () if self.ended else self.decisions

    def answer(self, decision: Decision) -> str:
        """The random player's text."""
        return run_now(self.players[decision.seat].decide(decision)).text

    def move(self, decision: Decision) -> str | None:
        """A seat's move, with as many tries as the game allows; None when it forfeits, which ends the game."""
        for _ in range(self.table.forfeit[0] + 1):
            text = self.answer(decision)
            try:
                return self.table.parse(decision.seat, text)
            except IllegalMove:
                continue
        self._end("forfeit", f"{decision.seat} gave no acceptable answer")
        return None

    @property
    def random_was_used(self) -> bool:
        """Whether the generator behind ``random.random()`` was touched, from the constructor on."""
        return self._construction.random_was_used() or self.table.random_was_used

    def advance(self) -> bool:
        """Play one round; False when the game is over."""
        if not self.open():
            return False
        return self.play_round()

    def play_round(self) -> bool:
        """Have every seat of the open round move; False when that ended the game."""
        moves: dict[str, str] = {}
        for decision in self.decisions:
            move = self.move(decision)
            if move is None:
                return False
            moves[decision.seat] = move
        self.submit(moves)
        return True

    def submit(self, moves: dict[str, str]) -> None:
        """Take these moves for the open round; the next `open` applies them."""
        self.lines.append(f"{list(moves.items())!r}")
        self.num_turns += len(moves)
        self._rounds_left -= 1
        self._moves = moves

    def go_on(self) -> bool:
        """As `advance`; an environment that raises ends the game too, and that is part of the record."""
        try:
            return self.advance()
        except EnvironmentFault as e:
            self._end("raised", e.traceback.strip().splitlines()[-1])
            return False

    def to_end(self) -> RandomGame:
        """Play on until the game is over."""
        while self.go_on():
            pass
        return self

    def copy(self) -> RandomGame:
        """A deep copy of the game and its players; raises `EnvironmentFault` when the environment cannot be copied."""
        twin = copy.copy(self)
        twin.table = self.table.copy()
        twin.players = copy.deepcopy(self.players)
        twin.lines = list(self.lines)
        return twin

    def digests(self) -> list[str]:
        """A short digest per line."""
        return [hashlib.blake2b(line.encode(), digest_size=8).hexdigest() for line in self.lines]

    def _finish(self) -> None:
        questions = self.table.jury_questions()
        if questions:
            self.table.hear_jury([self._verdict(q) for q in questions])
        self.outcome = self.table.outcome()
        self._end("natural", repr(self.outcome))

    def _verdict(self, question: JuryQuestion) -> dict[str, float]:
        """Any verdict, the same for the same game, so that every ending is seen."""
        rng = random.Random(derive_seed(self.seed, question.prompt))
        masses = {label: rng.choice((0.1, 1.0, 1.0)) for label in question.labels}
        return {label: mass / sum(masses.values()) for label, mass in masses.items()}

    def _end(self, how: str, words: str) -> None:
        self.ended = how
        self.lines.append(f"{how}: {words}")

    def _players(self) -> dict[str, Player]:
        seats = tuple(SeatAssignment(seat=s, player="random", agent="random") for s in self.table.seats)
        match = Match(index=0, env=self.env_id, env_params=dict(self.params), seed=self.seed, seats=seats)
        return sit_down(match, None, Sampling(), self.environment)


Make = Callable[[int], RandomGame]
"""Makes the game of a number."""


class OneByOne:
    """Makes an environment's games, and closes the last one first where it allows no two at once."""

    def __init__(self, env_id: str, params: Mapping[str, Scalar]) -> None:
        self._env_id, self._params = env_id, params
        self._last: RandomGame | None = None

    def __call__(self, number: int, max_rounds: int | None = None) -> RandomGame:
        if self._last is not None and not self._last.environment.concurrent:
            with contextlib.suppress(EnvironmentFault):  # whether it closes is a check of its own
                self._last.table.close()
        self._last = RandomGame(self._env_id, self._params, number, max_rounds)
        return self._last


def run_now(call: Coroutine[Any, Any, T]) -> T:
    """The result of a coroutine that never waits."""
    try:
        call.send(None)
    except StopIteration as done:
        result: T = done.value
        return result
    call.close()
    raise AssertionError("a random player waits for nothing")


def first_difference(a: RandomGame, b: RandomGame) -> tuple[int, str, str] | None:
    """(line number, a's line, b's line) where two records part; None when they are equal."""
    for i, (left, right) in enumerate(zip(a.lines, b.lines, strict=False)):
        if left != right:
            return i, left, right
    if len(a.lines) != len(b.lines):
        i = min(len(a.lines), len(b.lines))
        left, right = (g.lines[i] if i < len(g.lines) else "(the game is over)" for g in (a, b))
        return i, left, right
    return None
