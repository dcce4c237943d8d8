"""The game's side of the loop: one environment instance, called only inside its isolation, its answers checked.

In: seats' texts. Out: decisions to be made, moves, the outcome. Whatever the environment raises, and whatever it
returns that it may not, becomes an `EnvironmentFault` with the original traceback and the place in the game.
"""

from __future__ import annotations

import copy
import traceback
from collections.abc import Mapping, Sequence

from selfplay.agent import Decision
from selfplay.environment import Environment, JuryQuestion, Outcome
from selfplay.errors import EnvironmentFault, IllegalMove
from selfplay.play.normalise import checked_outcome, checked_rewards
from selfplay.play.text import clean, is_plain
from selfplay.registry.isolation import Isolation
from selfplay.types import derive_seed
from selfplay.wire.codec import clean_text


class Table:
    """An environment under guard. Not for use by several episodes."""

    def __init__(self, env_id: str, environment: Environment, seed: int) -> None:
        self.seats = tuple(environment.seats)
        self._env_id, self._environment, self._seed = env_id, environment, seed
        self._inside = _Inside(env_id, seed, numpy=environment.global_random)
        self._rules: dict[str, str] = {}

    @property
    def forfeit(self) -> tuple[int, float, float]:
        """(retries, offender's reward, the others' reward) as the environment declares."""
        f = self._environment.forfeit
        return f.retries, f.offender, f.others

    @property
    def num_printed_chars(self) -> int:
        return self._inside.num_printed_chars

    @property
    def random_was_used(self) -> bool:
        """Whether the environment touched the generator behind ``random.random()`` so far."""
        return self._inside.random_was_used()

    def open_round(self, moves: Mapping[str, str] | None = None) -> tuple[Decision, ...]:
        """Apply the last round's moves at once, if there was one; then one decision per seat that moves now.

        All decisions are made before any seat is asked. Empty when the game is over.
        """
        inside = self._inside
        with inside:
            if moves is not None:
                self._step(moves)
            inside.seat = ""
            seats = tuple(self._environment.to_move())
            self._check_movers(seats)
            if len(seats) == 1:
                return (self._decision(seats[0], inside.turn),)
            return tuple([self._decision(seat, inside.turn) for seat in seats])

    def _step(self, moves: Mapping[str, str]) -> None:
        self._inside.seat = next(iter(moves)) if len(moves) == 1 else ""
        try:
            self._environment.step(moves)
        except IllegalMove as e:
            raise ValueError(f"step() raised IllegalMove({e}); a move is refused in parse()") from e
        self._inside.turn += 1

    def _check_movers(self, seats: Sequence[str]) -> None:
        for seat in seats:
            if seat not in self.seats:
                raise ValueError(f"to_move() named {seat!r}, which is not a seat: {', '.join(self.seats)}")
        if len(seats) > 1 and len(set(seats)) != len(seats):
            raise ValueError(f"to_move() named a seat twice: {seats!r}")

    def _decision(self, seat: str, number: int) -> Decision:
        game = self._environment
        self._inside.seat = seat
        if (rules := self._rules.get(seat)) is None:
            rules = self._rules[seat] = _text(game.rules(seat), "rules")
        legal = game.legal_moves(seat)
        view = _text(game.view(seat), "view")
        if legal is None:
            suggestions = _texts(game.suggestions(seat))
            return Decision(seat=seat, round=number, rules=rules, view=view, legal_moves=None, suggestions=suggestions)
        if not (moves := _texts(legal)):
            raise ValueError("legal_moves() is empty for a seat that is to move")
        return Decision(seat=seat, round=number, rules=rules, view=view, legal_moves=moves)

    def look_again(self) -> tuple[Decision, ...]:
        """The decisions of the open round once more, as the game tells them now."""
        with self._inside:
            return tuple([self._decision(seat, self._inside.turn) for seat in self._environment.to_move()])

    def parse(self, seat: str, text: str) -> str:
        """The seat's move; raises `IllegalMove` as the environment does."""
        self._inside.seat = seat
        with self._inside:
            return _text(self._environment.parse(seat, text), "parse")

    def jury_questions(self) -> tuple[JuryQuestion, ...]:
        """What the game asks its jury."""
        self._inside.seat = ""
        with self._inside:
            return tuple(_question(q) for q in self._environment.jury_questions())

    def hear_jury(self, answers: Sequence[Mapping[str, float]]) -> None:
        """Tell the game what the jury said."""
        with self._inside:
            self._environment.hear_jury(answers)

    def outcome(self) -> Outcome:
        """The checked result of a game that is over."""
        self._inside.seat = ""
        with self._inside:
            return checked_outcome(self._environment, self._environment.outcome())

    def transcript(self) -> str:
        """The public record of the game so far."""
        self._inside.seat = ""
        with self._inside:
            return _text(self._environment.transcript(), "transcript")

    def raw_texts(self, seat: str) -> dict[str, str]:
        """``view`` and ``rules`` of a seat exactly as the game gives them."""
        self._inside.seat = seat
        with self._inside:
            return {"view": self._environment.view(seat), "rules": self._environment.rules(seat)}

    def private(self, seat: str) -> str | None:
        """What the game says that only ``seat`` knows, if it says so."""
        self._inside.seat = seat
        with self._inside:
            told = self._environment.private(seat)
            return None if told is None else _text(told, "private")

    def copy(self) -> Table:
        """A table with a deep copy of the environment, at the same point of the game."""
        with self._inside:
            twin = Table(self._env_id, copy.deepcopy(self._environment), self._seed)
        twin._inside.turn, twin._rules = self._inside.turn, dict(self._rules)
        return twin

    def close(self) -> None:
        """Let the environment let go of what it holds."""
        self._inside.seat = ""
        with self._inside:
            self._environment.close()

    def forfeit_rewards(self, offenders: Sequence[str]) -> dict[str, float]:
        """What the declared forfeit gives each seat; see `Forfeit` for games of more than two seats."""
        self._inside.seat = offenders[0]
        with self._inside:
            game, num_lost, num_others = self._environment, len(offenders), len(self.seats) - len(offenders)
            lost, others = game.forfeit.offender, game.forfeit.others
            if game.zero_sum and num_others:
                others = min(-lost * num_lost / num_others, game.reward_range[1])
                lost = -others * num_others / num_lost
            elif game.zero_sum:
                lost = 0.0
            return checked_rewards(game, {s: lost if s in offenders else others for s in self.seats})


class _Inside(Isolation):
    """The boundary to environment code: isolation on the way in, one kind of error on the way out."""

    def __init__(self, env_id: str, seed: int, *, numpy: bool) -> None:
        super().__init__(derive_seed(seed, "play"), numpy=numpy)
        self.seat, self.turn = "", 0
        self._env_id, self._seed = env_id, seed

    def _failed(self, error: BaseException) -> None:
        if isinstance(error, Exception | SystemExit) and not isinstance(error, IllegalMove):
            text = "".join(traceback.format_exception(error))
            raise EnvironmentFault(
                env=self._env_id, seed=self._seed, seat=str(self.seat), turn=self.turn, traceback=text
            ) from error


def _text(value: object, field: str) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{field}() returned {value!r} ({type(value).__name__}), expected text")
    return value if is_plain(value) else clean_text(value)


def _texts(values: Sequence[object]) -> tuple[str, ...]:
    """All of ``values`` as clean text; plain ones, nearly all, are looked at together."""
    texts = tuple(map(str, values))
    return texts if is_plain("".join(texts)) else tuple(map(clean_text, texts))


def _question(question: JuryQuestion) -> JuryQuestion:
    if len(set(question.labels)) != len(question.labels) or len(question.labels) < 2:
        raise ValueError(f"a jury question needs at least two different labels, got {question.labels!r}")
    return JuryQuestion(
        system=clean(question.system), prompt=clean(question.prompt), lead=clean(question.lead), labels=question.labels
    )
