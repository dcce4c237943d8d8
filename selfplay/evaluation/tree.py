"""The whole tree of a small game, walked through the environment itself: nothing here knows the rules of any game.

In: an environment id and its parameters. Out: a `GameTree` of chance, decisions and results, and its information states.
An *information state* is all a seat has been shown and has said: its rules, its views and its own moves, in order. Moves of a
simultaneous round are hidden from each other. At each decision the seat can also fail to make a legal move; where the
environment then sends the game (its forfeit) hangs below the decision as well.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from selfplay.agent import Decision
from selfplay.environment import Environment
from selfplay.errors import IllegalMove, UserError
from selfplay.evaluation.chance import ListedRandom, all_ways
from selfplay.play.normalise import checked_outcome
from selfplay.play.table import Table
from selfplay.registry import check_values, load_environment, resolve_environment_id
from selfplay.registry.environments import environment_parameters
from selfplay.types import Scalar

MAX_NODES = 60_000


@dataclass(frozen=True, slots=True)
class Terminal:
    """A result: one reward per seat, in seat order."""

    rewards: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Chance:
    """Probabilities and what follows."""

    branches: tuple[tuple[float, Node], ...]


@dataclass(frozen=True, slots=True)
class Choice:
    """A decision: one child per legal move of its information state, in that order, and one for making none."""

    state: int
    children: tuple[Node, ...]
    illegal: Node


Node = Terminal | Chance | Choice


@dataclass(frozen=True, slots=True)
class InfoState:
    """What a seat knows at a decision. ``past`` holds its earlier decisions and the moves it made."""

    index: int
    seat: int
    decision: Decision
    past: tuple[tuple[Decision, str], ...]
    answers: tuple[tuple[str, ...], ...]
    """Per legal move, the common ways to say it that the environment takes for that move; the first is the move itself."""

    @property
    def moves(self) -> tuple[str, ...]:
        """Legal moves."""
        return self.decision.legal_moves or ()


@dataclass(frozen=True)
class GameTree:
    """A game, whole. ``retries`` is how many further tries the environment gives after an illegal answer."""

    env_id: str
    seats: tuple[str, ...]
    root: Node
    states: tuple[InfoState, ...]
    num_nodes: int
    retries: int


def build_tree(env_id: str, params: Mapping[str, Scalar] | None = None, *, max_nodes: int = MAX_NODES) -> GameTree:
    """Walk the whole game. Raises `UserError` when it is too large or cannot be listed."""
    env_id = resolve_environment_id(env_id)
    values = check_values(env_id, environment_parameters(env_id), dict(params or {}))
    rng, kind = ListedRandom(), load_environment(env_id)
    builder = _Builder(env_id, rng, max_nodes)
    root = builder.chance(lambda: kind(rng, **values))
    return GameTree(
        env_id=env_id, seats=builder.seats, root=root, states=tuple(builder.states), num_nodes=builder.num_nodes,
        retries=builder.retries,
    )  # fmt: skip


Past = dict[str, tuple[tuple[Decision, str], ...]]


@dataclass
class _Builder:
    env_id: str
    rng: ListedRandom
    max_nodes: int
    seats: tuple[str, ...] = ()
    retries: int = 0
    num_nodes: int = 0
    states: list[InfoState] = field(default_factory=list)
    _known: dict[tuple[object, ...], InfoState] = field(default_factory=dict)
    _forfeits: dict[tuple[str, ...], Terminal] = field(default_factory=dict)

    def chance(self, make: Callable[[], Environment]) -> Node:
        """The games that ``make`` can make, each with all that follows."""
        games = []
        for way in all_ways(self.rng, make):
            games.append(way)
            self._check_size(self.num_nodes + len(games))
        branches = [(p, self._game(game, {})) for p, game in games]
        return branches[0][1] if len(branches) == 1 else Chance(tuple(branches))

    def _count(self) -> None:
        self.num_nodes += 1
        self._check_size(self.num_nodes)

    def _check_size(self, num_nodes: int) -> None:
        if num_nodes > self.max_nodes:
            raise UserError(
                f"{self.env_id} has more than {self.max_nodes} histories: too large for exact evaluation; play it with "
                "selfplay tournament, or train a best response against the checkpoint for a lower bound"
            )

    def _game(self, game: Environment, past: Past) -> Node:
        self._count()
        if not self.seats:
            self._first(game)
        movers = tuple(game.to_move())
        if not movers:
            outcome = checked_outcome(game, game.outcome())
            return Terminal(tuple(outcome.rewards[s] for s in self.seats))
        decisions = [self._decision(game, seat) for seat in movers]
        return self._round(game, past, decisions, {}, [])

    def _first(self, game: Environment) -> None:
        self.seats = tuple(str(s) for s in game.seats)
        self.retries = game.forfeit.retries
        if type(game).jury_questions is not Environment.jury_questions:
            raise UserError(f"{self.env_id} is decided by a jury: only games that decide themselves can be solved")

    def _decision(self, game: Environment, seat: str) -> Decision:
        legal = game.legal_moves(seat)
        if legal is None:
            raise UserError(f"{self.env_id} takes any text as a move: only games with a list of moves can be solved")
        return Decision(
            seat=seat, round=0, rules=game.rules(seat), view=game.view(seat), legal_moves=tuple(str(m) for m in legal)
        )

    def _round(
        self, game: Environment, past: Past, decisions: Sequence[Decision], made: dict[str, str], failed: list[str]
    ) -> Node:
        """The rest of a round: seats decide one after the other without seeing what the others of the round did."""
        if len(made) + len(failed) == len(decisions):
            return self._forfeit(game, failed) if failed else self._after(game, past, decisions, made)
        decision = decisions[len(made) + len(failed)]
        state = self._state(game, decision, past.get(decision.seat, ()))
        if len(made) + len(failed):
            self._count()
        children = [self._round(game, past, decisions, made | {decision.seat: move}, failed) for move in state.moves]
        illegal = self._round(game, past, decisions, made, [*failed, decision.seat])
        return Choice(state.index, tuple(children), illegal)

    def _after(self, game: Environment, past: Past, decisions: Sequence[Decision], made: dict[str, str]) -> Node:
        further = past | {d.seat: (*past.get(d.seat, ()), (d, made[d.seat])) for d in decisions}
        moves = {seat: game.parse(seat, move) for seat, move in made.items()}

        def step() -> Environment:
            following = copy.deepcopy(game)
            following.step(moves)
            return following

        games = list(all_ways(self.rng, step))
        branches = [(p, self._game(following, further)) for p, following in games]
        return branches[0][1] if len(branches) == 1 else Chance(tuple(branches))

    def _state(self, game: Environment, decision: Decision, past: tuple[tuple[Decision, str], ...]) -> InfoState:
        key = (decision.seat, decision.rules, decision.view, decision.legal_moves, tuple((d.view, m) for d, m in past))
        found = self._known.get(key)
        if found is None:
            answers = tuple(_ways_to_say(game, decision.seat, move) for move in decision.legal_moves or ())
            found = InfoState(len(self.states), self.seats.index(decision.seat), decision, past, answers)
            self._known[key] = found
            self.states.append(found)
        return found

    def _forfeit(self, game: Environment, failed: Sequence[str]) -> Terminal:
        key = tuple(failed)
        if key not in self._forfeits:
            rewards = Table(self.env_id, game, 0).forfeit_rewards(key)
            self._forfeits[key] = Terminal(tuple(rewards[s] for s in self.seats))
        return self._forfeits[key]


def _ways_to_say(game: Environment, seat: str, move: str) -> tuple[str, ...]:
    """``move`` as it is, with a capital, in capitals, each with a full stop: those that the environment understands."""
    meant = game.parse(seat, move)
    words = (move, move[:1].upper() + move[1:], move.upper())
    ways = dict.fromkeys((*words, *(f"{word}." for word in words)))
    return tuple(way for way in ways if way == move or _parsed(game, seat, way) == meant)


def _parsed(game: Environment, seat: str, text: str) -> str | None:
    try:
        return game.parse(seat, text)
    except IllegalMove:
        return None
