"""PettingZoo's games, AEC and Parallel: ``pettingzoo:tictactoe_v3``, ``pettingzoo:rps_v2`` with ``-p num_actions=5``.

AEC: a seat is asked when the library selects it; dead agents are stepped past without being asked; every seat's rewards are
summed to the very end, also those that come when another seat moves. Parallel: all live agents decide at once. Illegal
moves never reach the library.
"""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import random
import warnings
from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import Any

from selfplay.environment import Forfeit, Outcome
from selfplay.errors import ConfigError, UserError
from selfplay.types import Scalar
from selfplay_envs.adapters.common import NumberedMoves, best_seats, library, unknown, with_parameters
from selfplay_envs.adapters.pettingzoo_forms import GAMES, GameForm, Known

FAMILIES = ("classic", "butterfly", "sisl", "mpe", "atari", "magent")
LEFT_OUT = ("render_mode", "screen_height", "screen_scaling")
MAX_TURNS = 1000


class PettingZooGame(NumberedMoves):
    """A game of PettingZoo. Subclasses, made by `PettingZooAdapter`, name it."""

    module: ModuleType
    parallel = False
    known: Known = Known()
    form: GameForm = GameForm()

    def __init__(self, rng: random.Random, **parameters: Scalar) -> None:
        super().__init__(rng)
        self._parameters, self._seed = dict(parameters), rng.randrange(2**31)
        self._played: list[dict[str, int]] = []
        self._begin()
        self.seats = tuple(self.env.possible_agents)
        self._check_spaces()
        self.zero_sum, self.reward_range = self.known.zero_sum, self.known.reward_range
        self.max_turns = self.known.max_turns
        self.forfeit = Forfeit(retries=1, offender=max(-1.0, self.reward_range[0]), others=self.known.others)

    def _begin(self) -> None:
        """The library's game before the first move."""
        self.env = self._make(self._parameters)
        self._last: dict[str, Any] = {}
        if self.parallel:
            self._last, _ = self.env.reset(seed=self._seed)
        else:
            self.env.reset(seed=self._seed)
        self._totals = dict.fromkeys(self.env.possible_agents, 0.0)
        self._truncated = False
        self._names: dict[str, dict[str, int]] = {}
        self._observations: dict[str, Any] = {}
        self._history: list[str] = []
        self._past_the_dead()

    def rules(self, seat: str) -> str:
        return self.form.rules(self.env, seat)

    def to_move(self) -> Sequence[str]:
        agents: list[str] = self.env.agents
        if not agents or len(self._history) >= self.max_turns:
            return ()
        return list(agents) if self.parallel else (self.env.agent_selection,)

    def view(self, seat: str) -> str:
        return self.form.view(self.env, seat, self._observed(seat))

    def step(self, moves: Mapping[str, str]) -> None:
        numbers = {seat: self.moves(seat)[move] for seat, move in moves.items()}
        self._history.append(", ".join(f"{seat}: {move}" for seat, move in moves.items()))
        self._apply(numbers)

    def _apply(self, numbers: dict[str, int]) -> None:
        self._played.append(numbers)
        if self.parallel:
            self._last, rewards, _, truncations, _ = self.env.step(numbers)
            self._truncated |= any(truncations.values())
        else:
            self.env.step(next(iter(numbers.values())))
            rewards = self.env.rewards
            self._truncated |= any(self.env.truncations.values())
        self._add(rewards)
        self._names, self._observations = {}, {}
        self._past_the_dead()

    def outcome(self) -> Outcome:
        shown = ", ".join(f"{s} {r:g}" for s, r in self._totals.items())
        how = "the library cut the game" if self._truncated else "the game is over"
        return Outcome(
            rewards=dict(self._totals), winners=best_seats(self._totals), reason=f"{how}: {shown}",
            info={"truncated": self._truncated},
        )  # fmt: skip

    def transcript(self) -> str:
        return "\n".join(self._history)

    def close(self) -> None:
        self.env.close()

    def __deepcopy__(self, memo: dict[int, Any]) -> PettingZooGame:
        """A new game of the same seed, played to the same point: the library's own copies start afresh."""
        twin = type(self).__new__(type(self))
        twin.__dict__.update(self.__dict__)
        memo[id(self)] = twin
        twin._played = []
        twin._begin()
        for numbers in self._played:
            twin._apply(numbers)
        twin._history = list(self._history)
        return twin

    def _make(self, parameters: Mapping[str, Scalar]) -> Any:
        maker = self.module.parallel_env if self.parallel else self.module.env
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # about precision of observation bounds, which are not used here
                return maker(**parameters)
        except (TypeError, ValueError, AssertionError) as e:
            raise ConfigError(f"PettingZoo refuses these parameters: {e}") from None

    def _check_spaces(self) -> None:
        for seat in self.seats:
            space = self.env.action_space(seat)
            if not hasattr(space, "n"):
                raise UserError(
                    f"{self.module.__name__} has actions {space}: only numbered actions have names; "
                    f"write a class of your own that turns text into them"
                )

    def _observed(self, seat: str) -> Any:
        """The seat's observation in this position, asked for once."""
        if self.parallel:
            return self._last[seat]
        if seat not in self._observations:
            self._observations[seat] = self.env.observe(seat)
        return self._observations[seat]

    def _add(self, rewards: Mapping[str, Any]) -> None:
        for seat, reward in rewards.items():
            self._totals[seat] += float(reward)

    def _past_the_dead(self) -> None:
        """Step agents that are out, as the library wants it, and collect what that still pays."""
        if self.parallel:
            return
        env = self.env
        while env.agents and (env.terminations[env.agent_selection] or env.truncations[env.agent_selection]):
            env.step(None)
            self._add(env.rewards if env.agents else {})

    def _legal_numbers(self, seat: str) -> Sequence[int]:
        observed = self._observed(seat)
        mask = observed.get("action_mask") if isinstance(observed, Mapping) else None
        if mask is None and not self.parallel:
            mask = self.env.infos[seat].get("action_mask")
        if mask is None:
            return range(int(self.env.action_space(seat).n))
        return [int(i) for i in mask.nonzero()[0]]

    def _name(self, seat: str, number: int) -> str:
        return self.form.move(self.env, seat, number)


class PettingZooAdapter:
    """Entry point of the scheme ``pettingzoo``."""

    distribution = "pettingzoo"

    def names(self) -> Sequence[str]:
        """Modules named ``GAME_vN`` of every family that is installed."""
        library("pettingzoo", "a pettingzoo: environment", "pettingzoo[classic]")
        return sorted(name for family in FAMILIES for name in _games_of(family))

    def environment(self, name: str) -> type[PettingZooGame]:
        """The class of a game."""
        module = self._module(name)
        parallel = hasattr(module, "parallel_env") and (not hasattr(module, "env") or name in _SIMULTANEOUS)
        known, form = GAMES.get(name, (Known(), GameForm()))
        members: dict[str, Any] = {"module": module, "parallel": parallel, "known": known, "form": form}
        title = (module.__doc__ or "").strip().partition("\n")[0]
        found = type("PettingZooGame", (PettingZooGame,), {**members, "__doc__": title or f"{name} of PettingZoo."})
        found.__module__ = __name__

        def init(self: PettingZooGame, rng: random.Random, **values: Scalar) -> None:
            PettingZooGame.__init__(self, rng, **values)

        found.__init__ = with_parameters(init, _parameters(module))  # type: ignore[misc]
        return found

    def _module(self, name: str) -> ModuleType:
        for family in FAMILIES:
            if name in _games_of(family):
                return library(f"pettingzoo.{family}.{name}", f"pettingzoo:{name}", f"pettingzoo[{family}]")
        raise unknown("PettingZoo game", name, self.names())


ADAPTER = PettingZooAdapter()
_SIMULTANEOUS = ("rps_v2",)
"""Games with both APIs whose seats move at once: as AEC they would move one after the other."""


def _games_of(family: str) -> list[str]:
    try:
        package = importlib.import_module(f"pettingzoo.{family}")
    except ImportError:
        return []
    return [m.name for m in pkgutil.iter_modules(package.__path__) if m.name.rpartition("_v")[2].isdigit()]


def _parameters(module: ModuleType) -> dict[str, Scalar]:
    """Plain keyword parameters of the game's class with their defaults, rendering aside."""
    maker = getattr(module, "raw_env", None) or getattr(module, "parallel_env", None) or module.env
    return {
        name: p.default
        for name, p in inspect.signature(maker).parameters.items()
        if isinstance(p.default, bool | int | float | str) and name not in LEFT_OUT
    }
