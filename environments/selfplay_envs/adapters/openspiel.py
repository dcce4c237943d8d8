"""OpenSpiel's games: ``openspiel:leduc_poker``, ``openspiel:goofspiel`` with ``-p num_cards=5``.

Chance is drawn from the episode's generator; simultaneous nodes are rounds in which all seats decide; what a seat is shown
is its information state (its observation in games of perfect information). Rewards are the library's returns.
"""

from __future__ import annotations

import functools
import math
import random
from collections.abc import Mapping, Sequence
from typing import Any

from selfplay.environment import Forfeit, Outcome
from selfplay.errors import ConfigError, UserError
from selfplay.types import Scalar
from selfplay_envs.adapters.common import NumberedMoves, best_seats, library, unknown, with_parameters
from selfplay_envs.adapters.openspiel_forms import FORMS, StateForm

UNBOUNDED = 1e6
"""Declared as the reward range where the library names no bound."""
SEED_PARAMETERS = ("rng_seed", "seed")
"""Parameters of games that draw inside themselves: given from the episode's generator."""


class OpenSpielGame(NumberedMoves):
    """A game of OpenSpiel. Subclasses, made by `OpenSpielAdapter`, name it."""

    short_name = ""
    form: StateForm = StateForm()

    def __init__(self, rng: random.Random, **parameters: Scalar) -> None:
        super().__init__(rng)
        hidden_seed = _seed_parameter(self.short_name)
        if hidden_seed:
            parameters[hidden_seed] = rng.randrange(2**31)
        self.game = _load(self.short_name, tuple(sorted(parameters.items())), bool(hidden_seed))
        self.seats = tuple(f"player_{i}" for i in range(self.game.num_players()))
        low, high = self.game.min_utility(), self.game.max_utility()
        self.reward_range = (low if math.isfinite(low) else -UNBOUNDED, high if math.isfinite(high) else UNBOUNDED)
        self.zero_sum = self.game.get_type().utility.name == "ZERO_SUM"
        others = max(self.reward_range[0], min(self.reward_range[1], 0.0))
        self.forfeit = Forfeit(retries=1, offender=self.reward_range[0], others=others)
        self.max_turns = self.game.max_game_length() * (len(self.seats) if self._simultaneous() else 1)
        self.state = self.game.new_initial_state()
        self._names: dict[str, dict[str, int]] = {}
        self._history: list[str] = []
        self._draw_chance()

    def rules(self, seat: str) -> str:
        return self.form.rules(self.game, self.seats.index(seat))

    def to_move(self) -> Sequence[str]:
        state = self.state
        if state.is_terminal():
            return ()
        if state.is_simultaneous_node():
            return [s for i, s in enumerate(self.seats) if state.legal_actions(i)]
        return (self.seats[state.current_player()],)

    def view(self, seat: str) -> str:
        return self.form.view(self.state, self.seats.index(seat))

    def step(self, moves: Mapping[str, str]) -> None:
        numbers = {seat: self.moves(seat)[move] for seat, move in moves.items()}
        self._history.append(", ".join(f"{seat}: {move}" for seat, move in moves.items()))
        if self.state.is_simultaneous_node():
            self.state.apply_actions([numbers.get(s, 0) for s in self.seats])
        else:
            self.state.apply_action(next(iter(numbers.values())))
        self._names = {}
        self._draw_chance()

    def outcome(self) -> Outcome:
        returns = dict(zip(self.seats, map(float, self.state.returns()), strict=True))
        shown = ", ".join(f"{s} {r:g}" for s, r in returns.items())
        return Outcome(rewards=returns, winners=best_seats(returns), reason=f"the game is over: {shown}")

    def transcript(self) -> str:
        return "\n".join(self._history)

    def _legal_numbers(self, seat: str) -> Sequence[int]:
        legal: list[int] = self.state.legal_actions(self.seats.index(seat))
        return legal

    def _name(self, seat: str, number: int) -> str:
        return self.form.move(self.state, self.seats.index(seat), number)

    def _draw_chance(self) -> None:
        state, rng = self.state, self.rng
        while state.is_chance_node():
            outcomes = state.chance_outcomes()
            actions, weights = zip(*outcomes, strict=True)
            state.apply_action(rng.choices(actions, weights)[0])

    def _simultaneous(self) -> bool:
        return bool(self.game.get_type().dynamics.name == "SIMULTANEOUS")

    def __deepcopy__(self, memo: dict[int, Any]) -> OpenSpielGame:
        twin = type(self).__new__(type(self))
        twin.__dict__.update(self.__dict__)
        twin.rng = random.Random()
        twin.rng.setstate(self.rng.getstate())
        twin.state, twin._history = self.state.clone(), list(self._history)
        memo[id(self)] = twin
        return twin


class OpenSpielAdapter:
    """Entry point of the scheme ``openspiel``."""

    distribution = "open_spiel"

    def names(self) -> Sequence[str]:
        """Games that can be loaded without parameters and are played by players."""
        return [g.short_name for g in _library().registered_games() if g.default_loadable and not _why_not(g)]

    def environment(self, name: str) -> type[OpenSpielGame]:
        """The class of a game."""
        types = {g.short_name: g for g in _library().registered_games()}
        if name not in types:
            raise unknown("OpenSpiel game", name, types)
        if reason := _why_not(types[name]):
            raise UserError(f"openspiel:{name} cannot be played here: {reason}")
        kind = types[name]
        members = {"short_name": name, "form": FORMS.get(name, StateForm()), "__doc__": _doc(kind)}
        found = type("OpenSpielGame", (OpenSpielGame,), members)
        found.__module__ = __name__

        def init(self: OpenSpielGame, rng: random.Random, **values: Scalar) -> None:
            OpenSpielGame.__init__(self, rng, **values)

        found.__init__ = with_parameters(init, _parameters(kind))  # type: ignore[misc]
        return found


ADAPTER = OpenSpielAdapter()


def _library() -> Any:
    return library("pyspiel", "an openspiel: environment", "open_spiel")


def _why_not(kind: Any) -> str:
    if kind.dynamics.name == "MEAN_FIELD":
        return "mean-field games have no seats to play at"
    imperfect = kind.information.name != "PERFECT_INFORMATION"
    if imperfect and not (kind.provides_information_state_string or kind.provides_observation_string):
        return "it gives no text of what a player knows"
    return ""


def _doc(kind: Any) -> str:
    names = (kind.dynamics.name, kind.information.name, kind.utility.name)
    words = ", ".join(n.lower().replace("_", " ") for n in names)
    return f"{kind.long_name} ({kind.short_name}) of OpenSpiel: {words}."


def _parameters(kind: Any) -> dict[str, Scalar]:
    """The library's parameters with plain defaults; games as parameters of games stay at their defaults."""
    return {
        name: value
        for name, value in kind.parameter_specification.items()
        if isinstance(value, bool | int | float | str) and name.isidentifier() and name not in SEED_PARAMETERS
    }


@functools.cache
def _seed_parameter(name: str) -> str:
    known = next(g for g in _library().registered_games() if g.short_name == name).parameter_specification
    return next((p for p in SEED_PARAMETERS if p in known), "")


def _load(name: str, parameters: tuple[tuple[str, Scalar], ...], fresh: bool) -> Any:
    return _loaded.__wrapped__(name, parameters) if fresh else _loaded(name, parameters)


@functools.lru_cache(64)
def _loaded(name: str, parameters: tuple[tuple[str, Scalar], ...]) -> Any:
    pyspiel = _library()
    known = next(g for g in pyspiel.registered_games() if g.short_name == name).parameter_specification
    changed = {k: v for k, v in parameters if known.get(k) != v}
    try:
        return pyspiel.load_game(name, changed)
    except pyspiel.SpielError as e:
        raise ConfigError(f"OpenSpiel refuses these parameters: {' '.join(str(e).split())[:200]}") from None
