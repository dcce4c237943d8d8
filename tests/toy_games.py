"""Small games with one property each, players with a script, and matches for them."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from selfplay.agent import Answer, Decision, Player
from selfplay.environment import Environment, Forfeit, Outcome
from selfplay.play import Jury, play
from selfplay.types import Episode, Limits, Match, SeatAssignment


class Turns(Environment):
    """``length`` turns in rotation; the first seat wins. Any of x, y, z is legal."""

    def __init__(self, rng: random.Random, seats: Sequence[str] = ("a", "b"), length: int = 4) -> None:
        super().__init__(rng)
        self.seats, self.length = tuple(seats), length
        self.played: list[dict[str, str]] = []
        self.result: Any = Outcome(
            rewards={s: 1.0 if i == 0 else -1.0 / (len(seats) - 1) for i, s in enumerate(seats)},
            winners=(self.seats[0],), reason="the first seat wins",
        )  # fmt: skip

    def rules(self, seat: str) -> str:
        return f"rules for {seat}"

    def to_move(self) -> Sequence[str]:
        return () if len(self.played) >= self.length else (self.seats[len(self.played) % len(self.seats)],)

    def view(self, seat: str) -> str:
        return f"view of {seat} after {len(self.played)}"

    def legal_moves(self, seat: str) -> Sequence[str] | None:
        return ("x", "y", "z")

    def step(self, moves: Mapping[str, str]) -> None:
        self.played.append(dict(moves))

    def outcome(self) -> Outcome:
        return self.result


class Simultaneous(Turns):
    """All seats move at once; what was played in earlier rounds is shown to all."""

    forfeit = Forfeit(retries=1, offender=-1.0, others=1.0)

    def to_move(self) -> Sequence[str]:
        return () if len(self.played) >= self.length else self.seats

    def view(self, seat: str) -> str:
        return f"played: {self.played}"


class Scripted:
    """Answers with texts, `Answer`s, errors or functions of the decision, in order; the last one for ever."""

    def __init__(self, *script: Any, delay_s: float = 0.0) -> None:
        self.script, self.delay_s = list(script), delay_s
        self.asked: list[Decision] = []
        self.closed = 0
        self.cancelled = 0

    async def decide(self, decision: Decision) -> Answer:
        self.asked.append(decision)
        item = self.script[min(len(self.asked), len(self.script)) - 1]
        try:
            await asyncio.sleep(self.delay_s)
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        if isinstance(item, Exception):
            raise item
        if callable(item):
            item = item(decision)
        return item if isinstance(item, Answer) else Answer(text=item)

    async def close(self) -> None:
        self.closed += 1


def match_of(seats: Sequence[str], *, seed: int = 1, limits: Limits | None = None, player: str = "script") -> Match:
    """A match that seats ``player`` everywhere, as agents named after the seats."""
    assigned = tuple(SeatAssignment(seat=s, player=player, agent=s) for s in seats)
    return Match(index=0, env="toy-v0", seed=seed, seats=assigned, limits=limits or Limits())


def play_toy(
    game: Environment,
    players: Mapping[str, Player],
    *,
    seed: int = 1,
    limits: Limits | None = None,
    jury: Jury | None = None,
) -> Episode:
    """Play one toy game to its end."""
    match = match_of(tuple(players), seed=seed, limits=limits)
    return asyncio.run(play("toy-v0", game, players, match, jury=jury, env_source="toys 1.0"))


def seated(game: Environment, make: Callable[[str], Scripted] | None = None) -> dict[str, Scripted]:
    """A scripted player per seat; ``x`` for ever by default."""
    return {s: make(s) if make else Scripted("x") for s in game.seats}


def write_distribution(
    folder: Path,
    name: str,
    *,
    version: str = "1.0",
    modules: Mapping[str, str],
    entry_points: Mapping[str, Mapping[str, str]],
) -> Path:
    """An installed distribution in ``folder``: modules, metadata and entry points, as pip would leave them."""
    for module, source in modules.items():
        (folder / f"{module}.py").write_text(source, "utf-8")
    info = folder / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n", "utf-8")
    lines = [
        f"[{group}]\n" + "".join(f"{k} = {v}\n" for k, v in points.items()) for group, points in entry_points.items()
    ]
    (info / "entry_points.txt").write_text("\n".join(lines), "utf-8")
    return folder
