"""Equilibrium play for small solved games of hidden information: Kuhn poker (two players) and Leduc poker.

Kuhn: the first seat has a one-parameter family of equilibria (Kuhn, 1950): with J it bets with probability alpha, with K
with 3 alpha, and with Q it passes and calls with alpha + 1/3, for alpha in [0, 1/3]. The second seat has one equilibrium.
Leduc: a table beside this file, made by CFR+ (Tammelin, 2014); ``tools/solve_leduc.py`` writes it.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Mapping
from importlib import resources

import msgspec

from selfplay.agent import Answer, Decision, PlayerContext
from selfplay.errors import ConfigError, UserError
from selfplay.registry.parameters import Parameter, check_values

_KUHN = re.compile(r"Card: ([JQK])\. History: ([a-z, ]{1,40})\.")
_SHORT_KUHN = re.compile(r"([JQK])(?: ([pb]{1,2}))?")
_LEDUC = re.compile(
    r"Your card: ([JQK])\. Public card: ([JQK]|none)\. Round 1: ([a-z, ]{1,60})\.(?: Round 2: ([a-z, ]{1,60})\.)?"
)
_LEDUC_LETTERS = {"fold": "f", "check": "k", "call": "c", "raise": "r"}


class EquilibriumPlayer:
    """Plays a Nash equilibrium. Option ``alpha`` in [0, 1/3]: how often the first seat of Kuhn poker bluffs."""

    def __init__(self, context: PlayerContext) -> None:
        options = check_values(
            "agent kind equilibrium", (Parameter(name="alpha", kind="float", default=0.2),), context.options
        )
        game = re.sub(r"-v\d+\Z", "", context.env_id)
        if game not in _GAMES:
            raise UserError(f"equilibrium cannot play {context.env_id!r}; it knows {', '.join(sorted(_GAMES))}")
        self._alpha, self._rng, self._read = float(options["alpha"]), context.rng, _GAMES[game]
        if not 0.0 <= self._alpha <= 1 / 3:
            raise ConfigError(f"agent kind equilibrium: alpha is {self._alpha:g}; it must be between 0 and 1/3")

    async def decide(self, decision: Decision) -> Answer:
        probabilities = self._read(decision, self._alpha)
        (move,) = self._rng.choices(list(probabilities), weights=list(probabilities.values()))
        return Answer(text=move)

    async def close(self) -> None:
        """Nothing is held."""


def bet_probability(history: tuple[str, ...], card: str, alpha: float) -> float:
    """Probability to bet or call in Kuhn poker with ``card`` after ``history``, in the equilibrium of ``alpha``."""
    table = {
        (): {"J": alpha, "Q": 0.0, "K": 3 * alpha},
        ("pass",): {"J": 1 / 3, "Q": 0.0, "K": 1.0},
        ("bet",): {"J": 0.0, "Q": 1 / 3, "K": 1.0},
        ("pass", "bet"): {"J": 0.0, "Q": alpha + 1 / 3, "K": 1.0},
    }
    return table[history][card]


def _kuhn(decision: Decision, alpha: float) -> Mapping[str, float]:
    found = _read_kuhn(decision.view)
    if found is None or "players" in decision.rules:
        raise UserError("equilibrium plays kuhn-poker with two players only; this is another game")
    card, history = found
    p = bet_probability(history, card, alpha)
    return {"bet": p, "pass": 1.0 - p}


def _read_kuhn(view: str) -> tuple[str, tuple[str, ...]] | None:
    """(card, history) of either wording."""
    if short := _SHORT_KUHN.fullmatch(view):
        return short[1], tuple("pass" if letter == "p" else "bet" for letter in short[2] or "")
    if found := _KUHN.search(view):
        return found[1], () if found[2] == "none" else tuple(found[2].split(", "))
    return None


def leduc_probabilities(view: str) -> Mapping[str, float]:
    """Probability of each legal move in the situation that a view of Leduc poker shows."""
    words = {letter: word for word, letter in _LEDUC_LETTERS.items()}
    return {words[letter]: p for letter, p in _leduc_table()[_leduc_key(view)].items()}


def _leduc_key(view: str) -> str:
    """The view in its short wording, which is how the table names it."""
    if view in _leduc_table():
        return view
    found = _LEDUC.search(view)
    if found is None:
        raise UserError(f"equilibrium cannot read this view of leduc-poker: {view[:100]!r}")
    card, public, *rounds = found.groups()
    letters = ["".join(_LEDUC_LETTERS[m] for m in (r or "none").split(", ") if m != "none") for r in rounds]
    return f"{card}{'-' if public == 'none' else public} {' '.join(letters)}".strip()


def _leduc(decision: Decision, alpha: float) -> Mapping[str, float]:  # noqa: ARG001 - alpha is a matter of Kuhn poker
    return leduc_probabilities(decision.view)


@functools.cache
def _leduc_table() -> dict[str, dict[str, float]]:
    data = resources.files("selfplay_agents").joinpath("leduc.json").read_bytes()
    return msgspec.json.decode(data, type=dict[str, dict[str, float]])


_GAMES: dict[str, Callable[[Decision, float], Mapping[str, float]]] = {"kuhn-poker": _kuhn, "leduc-poker": _leduc}
