"""What a tournament is: environment, players, schedule, budgets; and its games, each with an id that is a hash of itself.

In: what the user asked for, checked. Out: ``tournament.json`` and `Game`s. The same pair of players meets on the same deal once
in every rotation of the seats; these games are one *pair* (with more than two seats: one round of rotations).
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from selfplay.config.schema import JuryConfig
from selfplay.errors import StoreError, UserError
from selfplay.ratings.match import Hypotheses
from selfplay.store.atomic import store_errors, write_bytes
from selfplay.types import BASE, Limits, Match, Scalar, SeatAssignment, derive_seed

Schedule = Literal["round-robin", "gauntlet", "swiss", "active"]
Origin = Literal["tournament", "match", "gate"]
STOPPED_BY_RESULT = (
    "games were played until a sequential test decided: differences that it found are biased away from 0"
)
SPEC_NAME = "tournament.json"


class Entrant(msgspec.Struct, frozen=True, kw_only=True):
    """One player. ``agent`` is its name on the policy server; ``adapter`` where its weights lie, with their digest."""

    name: str
    player: str
    agent: str = BASE
    version: int | None = None
    options: dict[str, Scalar] = {}
    adapter: str = ""
    digest: str = ""

    def seat(self, seat: str) -> SeatAssignment:
        """This player at ``seat``."""
        pin: Literal["turn"] | int = "turn" if self.version is None else self.version
        agent = self.agent if self.player == "llm" else self.player
        return SeatAssignment(seat=seat, player=self.player, agent=agent, pin=pin, options=self.options)

    @property
    def identity(self) -> str:
        """What makes it this player: kind and options, and the digest of its weights."""
        return msgspec.json.encode([self.player, self.digest, sorted(self.options.items())], order="sorted").decode()


class TournamentSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Everything that decides a tournament."""

    env: str
    env_source: str
    env_params: dict[str, Scalar] = {}
    seats: tuple[str, ...]
    players: tuple[Entrant, ...]
    schedule: Schedule = "round-robin"
    pairs: Annotated[int, Meta(ge=1)] = 50
    """Deals per table (set of players that meet); for swiss the number of rounds; for active the mean per table."""
    anchors: dict[str, float] = {}
    seating: tuple[str, ...] = ()
    """One table only, at which everybody keeps this seat (in seat order); empty: tables by schedule, each in all rotations."""
    compare: tuple[str, ...] = ()
    """For active: the two players whose difference matters; empty: the two that lead."""
    seed: int = 0
    model: str = ""
    """Base model of model players; empty when none plays."""
    jury: JuryConfig = JuryConfig()
    judge: Entrant | None = None
    """The adapter behind ``jury``, when that is neither the base nor an API."""
    temperature: float = 1.0
    max_move_tokens: int = 64
    limits: Limits = Limits()
    concurrency: Annotated[int, Meta(ge=1)] = 16
    budget_tokens: int = 0
    budget_time_s: float = 0.0
    origin: Origin = "tournament"
    """What had the games played: a tournament, a match, or the promotion gate of a run."""
    sprt: Hypotheses | None = None
    """Of a match: the test that stops it."""

    @property
    def served(self) -> tuple[Entrant, ...]:
        """Whose adapters an engine must have: the players and the judge."""
        return self.players if self.judge is None else (*self.players, self.judge)

    @property
    def challenger(self) -> str | None:
        """Whom a gauntlet is about: its first player."""
        return self.players[0].name if self.schedule == "gauntlet" else None

    def entrant(self, name: str) -> Entrant:
        """The player of that name; KeyError when there is none."""
        return next(p for p in self.players if p.name == name)

    def table_games(self, table: Sequence[str], pair: int) -> list[Game]:
        """The games of one table on deal number ``pair``: one per rotation of the seats that differs."""
        seatings = [self.seating] if self.seating else rotations(table)
        return [Game(id=self._game_id(s, pair), table=tuple(table), pair=pair, seating=s) for s in seatings]

    def tables(self) -> list[tuple[str, ...]]:
        """Every set of players that may meet."""
        if self.seating:
            return [self.seating]
        tables = all_tables([p.name for p in self.players], len(self.seats))
        return [t for t in tables if self.challenger in t] if self.challenger else tables

    def _game_id(self, seating: Sequence[str], pair: int) -> str:
        who = [self.entrant(name).identity for name in seating]
        what = [self.env, sorted(self.env_params.items()), self.seed, self.temperature, pair, list(seating), who]
        if self.jury.agent != BASE:  # the same game before another jury is another game
            what.append(self.judge.identity if self.judge is not None else [self.jury.agent, self.jury.api_model])
        return hashlib.blake2b(msgspec.json.encode(what, order="sorted"), digest_size=8).hexdigest()

    def match(self, game: Game, attempt: int) -> Match:
        """The match of a game: its deal depends on the table and the pair only, so that all rotations share it."""
        return Match(
            index=game.index, env=self.env, env_params=self.env_params,
            seed=derive_seed(self.seed, "deal", *sorted(game.table), game.pair),
            seats=tuple(self.entrant(p).seat(s) for s, p in zip(self.seats, game.seating, strict=True)),
            limits=self.limits, attempt=attempt,
        )  # fmt: skip

    def save(self, folder: Path) -> None:
        """Write the spec into the tournament's folder."""
        write_bytes(folder / SPEC_NAME, msgspec.json.format(msgspec.json.encode(self), indent=2) + b"\n")

    @classmethod
    def load(cls, folder: Path) -> TournamentSpec:
        """Read it back; `UserError` when ``folder`` is no tournament, `StoreError` when the file is damaged."""
        path = folder / SPEC_NAME
        if not path.is_file():
            raise UserError(f"{folder} is not a tournament: it has no {SPEC_NAME}")
        with store_errors(path):
            data = path.read_bytes()
        try:
            return msgspec.json.decode(data, type=cls)
        except msgspec.DecodeError as e:
            raise StoreError(f"{path} is damaged: {e}") from e


class Game(msgspec.Struct, frozen=True, kw_only=True):
    """One game to be played: who sits at which seat (in the order of the environment's seats), on which deal of which table."""

    id: str
    table: tuple[str, ...]
    pair: int
    seating: tuple[str, ...]

    @property
    def index(self) -> int:
        """The id as the number that a match carries."""
        return int(self.id, 16) >> 1

    @property
    def cluster(self) -> str:
        """Games of one table and deal belong together."""
        return f"{'|'.join(sorted(self.table))}#{self.pair}"


def rotations(table: Sequence[str]) -> list[tuple[str, ...]]:
    """The table as it is, and moved on by one seat, two seats, …; those that differ."""
    return list(dict.fromkeys((*table[k:], *table[:k]) for k in range(len(table))))


def all_tables(players: Sequence[str], num_seats: int) -> list[tuple[str, ...]]:
    """Every set of players that can meet; where there are fewer players than seats some sit twice, but never one alone."""
    if len(players) >= num_seats:
        return list(itertools.combinations(players, num_seats))
    return [t for t in itertools.combinations_with_replacement(players, num_seats) if len(set(t)) == len(players)]


def units(spec: TournamentSpec) -> Iterator[tuple[tuple[str, ...], int]]:
    """(table, pair) in the order of a fixed schedule; whole rounds first, so that a stop leaves everybody with as many games."""
    tables = spec.tables()
    for pair in range(spec.pairs):
        for table in tables:
            yield table, pair
