"""The environment protocol: what a game must tell.

    game = Nim(random.Random(seed), heap=21)          # one instance is one episode
    while (seats := game.to_move()):
        moves = {}
        for seat in seats:                            # more than one seat: simultaneous, nobody sees a move of this round
            text = ask(seat, game.rules(seat), game.view(seat), game.legal_moves(seat))
            moves[seat] = game.parse(seat, text)      # IllegalMove: the seat is told why and tries again, then forfeits
        game.step(moves)
    result = game.outcome()

An environment is plain Python: it gets its random generator, does no I/O, and knows nothing of models. A seat that is
eliminated is simply never returned by ``to_move`` again. Hidden information is whatever ``view`` does not tell a seat.
"""

from __future__ import annotations

import functools
import inspect
import random
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence

import msgspec

from selfplay.errors import IllegalMove
from selfplay.types import Scalar


class Forfeit(msgspec.Struct, frozen=True, kw_only=True):
    """What a seat's illegal moves cost: after ``retries`` further tries the seat forfeits.

    The offender gets ``offender``, every other seat ``others``: one equal result. In a zero-sum game the others share
    equally what is lost, whatever ``others`` says, and when several forfeit in one round they lose no more together than
    the others may win; when all do, all get 0.
    """

    retries: int = 1
    offender: float = -1.0
    others: float = 1.0


class JuryQuestion(msgspec.Struct, frozen=True, kw_only=True):
    """A question answered by the probability mass of ``labels``: an answer always exists and text cannot forge it.

    ``system`` and ``prompt`` form a chat; ``lead`` is the beginning of the juror's answer, up to the label.
    """

    system: str
    prompt: str
    lead: str
    labels: tuple[str, ...]


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """How a game ended: a reward per seat, the winners (empty for a draw), and the game's own words for it."""

    rewards: dict[str, float]
    winners: tuple[str, ...] = ()
    reason: str = ""
    info: dict[str, Scalar] = {}


class Environment(ABC):
    """Base class of games. Override ``seats`` and the methods without a body; keyword parameters of ``__init__``
    are the environment's typed parameters (bool, int, float or str, each with a default). A value of a parameter that
    the game cannot be played with is a `ConfigError`. What depends on a parameter may be set in ``__init__``."""

    seats: Sequence[str] = ()
    """Names of the places at the table, in turn order. May be set in ``__init__`` when a parameter decides it."""
    zero_sum: bool = True
    reward_range: tuple[float, float] = (-1.0, 1.0)
    """Rewards outside this range are a fault of the environment."""
    forfeit: Forfeit = Forfeit()
    max_turns: int = 200
    """Decisions of all seats together after which an episode is cut as ``truncated``."""
    max_move_tokens: int = 64
    """How many tokens a model may sample for one move, unless the run says otherwise."""
    presets: Mapping[str, Mapping[str, Scalar]] = {}
    """Named sets of parameter values: ``preset=NAME`` among the parameters takes them, others given beside it win."""
    data_files: Sequence[str] = ()
    """Files beside the module that the game is played with; their contents belong to the environment's content hash."""
    global_random: bool = False
    """Declared by a game that cannot but draw from the module-level generators. Each episode has its own state of them."""

    concurrent: bool = True
    """False for a game of which a process can hold only one at a time (one connection, one state of a C library): each
    worker then plays its games one after the other, whatever ``rollout.concurrency`` says."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng

    def rules(self, seat: str) -> str:
        """The rules as told to ``seat`` once, before the first turn. The default is the docstring of the class."""
        return inspect.cleandoc(type(self).__doc__ or "")

    @abstractmethod
    def to_move(self) -> Sequence[str]:
        """Seats that decide now; several for simultaneous moves; empty when the game is over."""

    @abstractmethod
    def view(self, seat: str) -> str:
        """What ``seat`` is told when it is asked to move: everything it may know and nothing more."""

    def legal_moves(self, seat: str) -> Sequence[str] | None:
        """The moves ``seat`` may make, or None when any text is a move."""
        return None

    def suggestions(self, seat: str) -> Sequence[str]:
        """Answers worth trying for players that cannot read, in games where any text is a move; none by default."""
        return ()

    def parse(self, seat: str, text: str) -> str:
        """Turn a seat's answer into a move; raise `IllegalMove` with the reason to show the seat.

        The default accepts the legal move that the answer names last (case and punctuation aside), and any text when
        ``legal_moves`` is None.
        """
        legal = self.legal_moves(seat)
        return text.strip() if legal is None else named_move(text, legal)

    @abstractmethod
    def step(self, moves: Mapping[str, str]) -> None:
        """Apply one move for every seat of ``to_move``, at once."""

    @abstractmethod
    def outcome(self) -> Outcome:
        """The result; asked for once, when ``to_move`` is empty and the jury has been heard."""

    def jury_questions(self) -> Sequence[JuryQuestion]:
        """Questions for the jury when the game is over; empty for games that need no jury."""
        return ()

    def hear_jury(self, answers: Sequence[Mapping[str, float]]) -> None:
        """Receive, for each question, label → probability (they sum to 1)."""

    def transcript(self) -> str:
        """The public record of the game so far, for people who watch."""
        return ""

    def private(self, seat: str) -> str | None:
        """What ``seat`` knows beside the public record, for ``selfplay env check``: whenever both are the same in two games,
        the seat must be shown the same. Empty where nothing is hidden; None leaves it unsaid, and unchecked."""
        return None

    def close(self) -> None:
        """Let go of what the game holds. Called once by the play loop, however the episode ends."""

    def win(self, *winners: str, reason: str = "") -> Outcome:
        """An outcome in which ``winners`` share what the others lose: 1 and -1 with two seats."""
        won = self.reward_range[1] if not self.zero_sum else 1.0
        lost = self.reward_range[0] if not self.zero_sum else -len(winners) / max(1, len(self.seats) - len(winners))
        rewards = {s: won if s in winners else lost for s in self.seats}
        return Outcome(rewards=rewards, winners=winners, reason=reason or f"{' and '.join(winners)} won")

    def draw(self, reason: str = "draw") -> Outcome:
        """An outcome in which every seat gets 0."""
        return Outcome(rewards=dict.fromkeys(self.seats, 0.0), reason=reason)


MAX_PARSED_CHARS = 4096


def named_move(text: str, legal: Sequence[str]) -> str:
    """The legal move that ``text`` names last, as whole words, ignoring case; raises `IllegalMove`.

    Linear in the text; only its last `MAX_PARSED_CHARS` characters are read. Moves that are numbers count as their text.
    """
    legal = [str(move) for move in legal]
    if text.strip() in legal:  # word for word: names may differ in nothing but case or marks
        return text.strip()
    words = _words(text[-MAX_PARSED_CHARS:])
    ends: dict[str, list[int]] = {}
    for end in range(len(words), 0, -1):
        ends.setdefault(words[end - 1], []).append(end)
    best: tuple[int, int, str] | None = None
    for move in legal:
        wanted = _move_words(move)
        for end in ends.get(wanted[-1], ()) if wanted else ():
            if tuple(words[max(0, end - len(wanted)) : end]) == wanted:
                best = max(best or (0, 0, ""), (end, len(wanted), move))
                break
    if best is None:
        raise IllegalMove(f"not a legal move; answer with one of: {', '.join(legal)}")
    return best[2]


@functools.lru_cache(8192)
def _move_words(move: str) -> tuple[str, ...]:
    return tuple(_words(move))


def _words(text: str) -> list[str]:
    cleaned = "".join(c if c.isalnum() or c in "-+_" else " " for c in text.casefold())
    return cleaned.split()
