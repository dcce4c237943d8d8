"""Gymnasium's environments with one seat and numbered actions: ``gym:FrozenLake-v1``, ``gym:Blackjack-v1``.

What is shown is the library's text rendering where it has one (a highlighted place in brackets), else the observation's
numbers. The reward is the sum over the episode; the library's time limit cuts a game as the library says.
"""

from __future__ import annotations

import inspect
import random
import re
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

from selfplay.environment import Forfeit, Outcome
from selfplay.errors import UserError
from selfplay.types import Scalar
from selfplay_envs.adapters.common import NumberedMoves, library, unknown, with_parameters

_COLOUR = re.compile(r"\x1b\[(\d+(?:;\d+)*)m")
_HIGHLIGHT = re.compile(r"\x1b\[\d+(?:;\d+)*m(.*?)\x1b\[0m", re.DOTALL)
ACTIONS: Mapping[str, Sequence[str]] = {
    "FrozenLake": ("left", "down", "right", "up"),
    "CliffWalking": ("up", "right", "down", "left"),
    "Taxi": ("south", "north", "east", "west", "pickup", "dropoff"),
    "Blackjack": ("stick", "hit"),
    "CartPole": ("left", "right"),
    "MountainCar": ("left", "coast", "right"),
    "Acrobot": ("negative", "none", "positive"),
}
"""Names of actions by the name of the game; numbers elsewhere."""
MAX_TURNS = 500
REWARDS = (-1e6, 1e6)


class GymForm:
    """How observations and actions read. Subclass, and set ``form`` of a game's class, to replace it."""

    def __init__(self, actions: Sequence[str] = ()) -> None:
        self._actions = actions

    def view(self, env: Any, observed: Any) -> str:
        """The text rendering, else the numbers."""
        if env.render_mode == "ansi":
            drawn = _HIGHLIGHT.sub(lambda m: f"[{m[1]}]", str(env.render()))
            return _COLOUR.sub("", drawn).strip("\n")
        return f"observation: {_numbers(observed)}"

    def move(self, number: int) -> str:
        """The name of an action."""
        return self._actions[number] if number < len(self._actions) else str(number)


def _numbers(value: Any) -> str:
    shape: Sequence[int] = getattr(value, "shape", ())
    if isinstance(value, tuple | list) or shape:
        return "(" + ", ".join(_numbers(v) for v in value) + ")"
    return f"{float(value):.4g}"


class GymGame(NumberedMoves):
    """An environment of Gymnasium. Subclasses, made by `GymAdapter`, name it."""

    seats: Sequence[str] = ("player",)
    zero_sum = False
    reward_range = REWARDS
    forfeit = Forfeit(retries=1, offender=0.0, others=0.0)
    max_turns = MAX_TURNS
    gym_id = ""
    ansi = False
    """Whether the library draws it as text."""
    form: GymForm = GymForm()

    def __init__(self, rng: random.Random, **parameters: Scalar) -> None:
        super().__init__(rng)
        gymnasium = library("gymnasium", "a gym: environment")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self.env = gymnasium.make(self.gym_id, render_mode="ansi" if self.ansi else None, **parameters)
            if not hasattr(self.env.action_space, "n"):
                raise UserError(
                    f"gym:{self.gym_id} has actions {self.env.action_space}: only numbered actions have names; "
                    f"write a class of your own that turns text into them"
                )
            self._observed, self._info = self.env.reset(seed=rng.randrange(2**31))
        self._total, self._ended, self._how = 0.0, False, "the game is over"
        self._names: dict[str, dict[str, int]] = {}
        self._history: list[str] = []

    def rules(self, seat: str) -> str:
        name = self.gym_id.rpartition("-v")[0].rpartition("/")[2]
        return f"You play {name}. Answer with one legal move."

    def to_move(self) -> Sequence[str]:
        return () if self._ended else self.seats

    def view(self, seat: str) -> str:
        return self.form.view(self.env, self._observed)

    def step(self, moves: Mapping[str, str]) -> None:
        ((seat, move),) = moves.items()
        number = self.moves(seat)[move]
        self._history.append(move)
        self._observed, reward, terminated, truncated, self._info = self.env.step(number)
        self._total += float(reward)
        self._ended = bool(terminated or truncated)
        if truncated and not terminated:
            self._how = "the library's time limit"
        self._names = {}

    def outcome(self) -> Outcome:
        return Outcome(rewards={"player": self._total}, reason=f"{self._how}: total reward {self._total:g}")

    def transcript(self) -> str:
        return ", ".join(self._history)

    def close(self) -> None:
        self.env.close()

    def _legal_numbers(self, seat: str) -> Sequence[int]:
        space = self.env.action_space
        start = int(getattr(space, "start", 0))
        mask = self._info.get("action_mask")
        if mask is not None and any(mask):
            return [start + i for i, allowed in enumerate(mask) if allowed]
        return range(start, start + int(space.n))

    def _name(self, seat: str, number: int) -> str:
        return self.form.move(number)


class GymAdapter:
    """Entry point of the scheme ``gym``."""

    distribution = "gymnasium"

    def names(self) -> Sequence[str]:
        """Everything that is registered with Gymnasium."""
        return sorted(library("gymnasium", "a gym: environment").registry)

    def environment(self, name: str) -> type[GymGame]:
        """The class of an environment."""
        gymnasium = library("gymnasium", "a gym: environment")
        if name not in gymnasium.registry:
            raise unknown("Gymnasium environment", name, gymnasium.registry)
        try:
            creator = gymnasium.envs.registration.load_env_creator(gymnasium.spec(name).entry_point)
        except ImportError as e:
            raise UserError(f"gym:{name} cannot be loaded: {e}") from None
        ansi = "ansi" in getattr(creator, "metadata", {}).get("render_modes", ())
        form = GymForm(ACTIONS.get(name.rpartition("-v")[0], ()))
        members = {"gym_id": name, "ansi": ansi, "form": form, "__doc__": f"{name} of Gymnasium."}
        found = type("GymGame", (GymGame,), members)
        found.__module__ = __name__

        def init(self: GymGame, rng: random.Random, **values: Scalar) -> None:
            GymGame.__init__(self, rng, **values)

        declared = {
            p.name: p.default for p in inspect.signature(creator).parameters.values() if p.name != "render_mode"
        }
        values = {**declared, **gymnasium.spec(name).kwargs}
        plain = {k: v for k, v in values.items() if isinstance(v, bool | int | float | str)}
        found.__init__ = with_parameters(init, plain)  # type: ignore[misc]
        return found


ADAPTER = GymAdapter()
