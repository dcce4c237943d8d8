"""TextArena's games: ``textarena:Nim-v0``, ``textarena:LiarsDice-v0`` with ``-p players=3``.

A fresh instance of the game is made for every episode, without the library's observation wrapper (which keeps what it was
told across resets). The library seeds and draws from the module-level generators: the class declares ``global_random``, so
that every episode has its own state of them. Nothing is fetched: games that ask a model over the network get a jury that
favours nobody.

An illegal move is the library's business: it tells the player, lets it try again as often as the game allows, and then
ends the game. Observations are the library's messages; ``history=new`` shows a seat only what it has not been shown.
"""

from __future__ import annotations

import importlib
import random
import re
from collections.abc import Mapping, Sequence
from typing import Any

from selfplay.environment import Environment, Forfeit, Outcome
from selfplay.errors import ConfigError, UserError
from selfplay.types import Scalar
from selfplay_envs.adapters.common import best_seats, library, unknown, with_parameters

MAX_TURNS = 300
MAX_PLAYERS = 15
_BRACKETED = re.compile(r"\[[^\[\]\n]{1,40}\]")
_NUM_SUGGESTIONS = 60
_NETWORK = ("jury_class",)


class EvenJury:
    """Stands where the library would ask models over the network: every option gets the same share."""

    def __init__(self, jury_size: int = 1, options: Sequence[str] = (), **_rest: object) -> None:
        self._options = list(options)

    def evaluate(self, context: str) -> dict[str, float]:
        """Share of votes per option."""
        return dict.fromkeys(self._options, 1.0 / max(1, len(self._options)))


class TextArenaGame(Environment):
    """A game of TextArena. Subclasses, made by `TextArenaAdapter`, name it."""

    kind: type[Any]
    arguments: Mapping[str, Any]
    brackets = False
    """Whether the library's own wrapper would put brackets around an answer that has none."""
    num_players = 0
    """The smallest number of players that the game accepts."""
    zero_sum = False
    reward_range = (-100.0, 100.0)
    forfeit = Forfeit(retries=1, offender=-1.0, others=0.0)
    max_turns = MAX_TURNS
    max_move_tokens = 256
    global_random = True

    def __init__(self, rng: random.Random, players: int = 0, history: str = "full") -> None:
        super().__init__(rng)
        if history not in ("full", "new"):
            raise ConfigError(f"history is {history!r}; it must be full or new")
        count = players or self.num_players
        self._only_new = history == "new"
        self.env = self.kind(**self.arguments)
        try:
            self.env.reset(num_players=count, seed=rng.randrange(2**31))
        except (AssertionError, ValueError) as e:
            if players:
                raise ConfigError(f"players is {players}; the game says: {e}") from None
            raise
        self.seats = tuple(f"player_{i}" for i in range(count))
        self._told: dict[str, list[str]] = {s: [] for s in self.seats}
        self._num_shown = dict.fromkeys(self.seats, 0)
        self._rules: dict[str, list[str]] = {s: [] for s in self.seats}
        self._history: list[str] = []
        self._done = False
        self._mover = ""
        self._observe()

    def rules(self, seat: str) -> str:
        return "\n".join(self._rules[seat]) or f"You play {self.kind.__name__.removesuffix('Env')} as {seat}."

    def to_move(self) -> Sequence[str]:
        return () if self._done else (self._mover,)

    def view(self, seat: str) -> str:
        told = self._told[seat][self._num_shown[seat] :] if self._only_new else self._told[seat]
        return "\n".join(told) or f"It is your turn, {seat}."

    def suggestions(self, seat: str) -> Sequence[str]:
        """Answers in the form that the game's own words show in brackets, with other numbers and letters in them."""
        shown = "\n".join([*self._rules[seat], *self._told[seat][-6:]])
        names = {f"[{name}]" for name in self._speakers().values()}
        return _variants([form for form in dict.fromkeys(_BRACKETED.findall(shown)) if form not in names])

    def step(self, moves: Mapping[str, str]) -> None:
        ((seat, move),) = moves.items()
        self._num_shown[seat] = len(self._told[seat])
        self._history.append(f"{seat}: {move}")
        bare = "[" not in move and "]" not in move
        self._done, _ = self.env.step(f"[{move}]" if self.brackets and bare else move)
        if not self._done:
            self._observe()

    def outcome(self) -> Outcome:
        rewards, info = self.env.close()
        returns = {s: float((rewards or {}).get(i, 0.0)) for i, s in enumerate(self.seats)}
        about = [info.get(i, {}) for i in range(len(self.seats))]
        reasons = dict.fromkeys(str(a["reason"]) for a in about if a.get("reason"))
        invalid = any(a.get("invalid_move") for a in about)
        return Outcome(
            rewards=returns, winners=best_seats(returns) if len(self.seats) > 1 else (),
            reason=" ".join(reasons) or "the game is over", info={"invalid_move": invalid},
        )  # fmt: skip

    def transcript(self) -> str:
        return "\n".join(self._history)

    def _speakers(self) -> dict[int, str]:
        """Names of those who say something, by the library's numbers: -1 is the game."""
        known = {-1: "GAME", **{i: f"Player {i}" for i in range(len(self.seats))}}
        return {**known, **(getattr(self.env.state, "role_mapping", None) or {})}

    def _observe(self) -> None:
        """Whose turn it is, and what that player is told since its last turn."""
        player, messages = self.env.get_observation()
        self._mover = self.seats[player]
        names = self._speakers()
        for sender, text, *kind in messages:
            if kind and getattr(kind[0], "name", kind[0]) == "PROMPT":
                self._rules[self._mover].append(str(text))
            else:
                self._told[self._mover].append(f"[{names.get(sender, sender)}] {text}")


class TextArenaAdapter:
    """Entry point of the scheme ``textarena``."""

    distribution = "textarena"

    def names(self) -> Sequence[str]:
        """Every registered game in its own form, without the variants that only change how it is wrapped."""
        registry = _registry()
        return sorted(n for n in registry if not n.endswith(("-raw", "-train")))

    def environment(self, name: str) -> type[TextArenaGame]:
        """The class of a game; raises `UserError` when the game cannot be made offline."""
        registry = _registry()
        if name not in registry:
            raise unknown("TextArena game", name, registry)
        spec = registry[name]
        kind = _class(name, spec.entry_point)
        arguments = dict(spec.kwargs)
        if any(p in kind.__init__.__code__.co_varnames for p in _NETWORK):
            arguments["jury_class"] = EvenJury
        wrappers = [w.__name__ for w in spec.default_wrappers or ()]
        members: dict[str, Any] = {
            "kind": kind, "arguments": arguments, "brackets": "ActionFormattingWrapper" in wrappers,
            "num_players": _smallest(name, kind, arguments), "__doc__": f"{name} of TextArena.",
        }  # fmt: skip
        found = type("TextArenaGame", (TextArenaGame,), members)
        found.__module__ = __name__

        def init(self: TextArenaGame, rng: random.Random, **values: Scalar) -> None:
            TextArenaGame.__init__(self, rng, **values)  # type: ignore[arg-type]

        found.__init__ = with_parameters(init, {"players": 0, "history": "full"})  # type: ignore[misc]
        return found


ADAPTER = TextArenaAdapter()


def _registry() -> dict[str, Any]:
    library("textarena", "a textarena: environment")
    registry: dict[str, Any] = importlib.import_module("textarena.envs.registration").ENV_REGISTRY
    return registry


def _class(name: str, entry_point: Any) -> Any:
    if not isinstance(entry_point, str):
        return entry_point
    module, _, attribute = entry_point.partition(":")
    try:
        return getattr(importlib.import_module(module), attribute)
    except ModuleNotFoundError as e:
        raise UserError(f"textarena:{name} needs the package {e.name!r}, which TextArena does not bring") from None


def _smallest(name: str, kind: Any, arguments: Mapping[str, Any]) -> int:
    """The smallest number of players, two before one, that a game of this kind can begin with."""
    reason = ""
    counts: tuple[int, ...] = (2, 1, *range(3, MAX_PLAYERS + 1))
    for count in counts:
        try:
            kind(**arguments).reset(num_players=count, seed=0)
        except Exception as e:  # noqa: BLE001 - the boundary to the library: games refuse a count in many ways
            reason = reason or f"{type(e).__name__}: {' '.join(str(e).split())[:200]}"
            continue
        return count
    raise UserError(f"textarena:{name} cannot be made here with 1 to {MAX_PLAYERS} players: {reason}")


def _variants(shown: list[str]) -> list[str]:
    """The answers shown, and the same with numbers and single letters exchanged; at most `_NUM_SUGGESTIONS`."""
    out = dict.fromkeys(shown)
    for form in shown:
        parts = re.split(r"(\d+|\b[A-Za-z]\b)", form)
        for shift in range(1, 9):
            if len(parts) > 1:
                out["".join(_shifted(p, shift + i) if i % 2 else p for i, p in enumerate(parts))] = None
    return list(out)[:_NUM_SUGGESTIONS]


def _shifted(part: str, shift: int) -> str:
    if part.isdigit():
        return str((int(part) + shift) % 10)
    return chr((ord(part.lower()) - 97 + shift) % 8 + (97 if part.islower() else 65))
