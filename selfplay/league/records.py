"""Every game's result, in ``league.sqlite``: the one record that ratings, win shares and payoff matrices are made from.

In: finished episodes; void and failed attempts never come here. Out: counts per seat and per pair of players. A game is
known by its episode id, so recording it twice changes nothing. Players are ``agent@n``, ``base`` or a bot's name; a seat
played by more than one version is ``agent@lo..hi`` and stays out of comparisons between players.
"""

from __future__ import annotations

import sqlite3
import threading
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import permutations
from pathlib import Path
from typing import Any

import msgspec

from selfplay.errors import StoreError
from selfplay.types import BASE, Ended, Episode, PolicyVersion, SeatAssignment

SCHEMA = 1
PAST = "past-"
"""Snapshots are served under their agent's name with this before it; records call them by their real name."""
_TABLE = """
CREATE TABLE IF NOT EXISTS games (
    episode_id TEXT PRIMARY KEY, env TEXT NOT NULL, env_source TEXT NOT NULL, seed TEXT NOT NULL,
    players TEXT NOT NULL, ended TEXT NOT NULL, reason TEXT NOT NULL, offender TEXT, winners TEXT NOT NULL,
    rewards TEXT NOT NULL, turns INTEGER NOT NULL, tokens INTEGER NOT NULL
) STRICT
"""


def served_name(version: PolicyVersion) -> PolicyVersion:
    """The name under which a snapshot is served."""
    return PolicyVersion(PAST + version.agent, version.version)


class GameRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One game. ``players`` maps seat → player, in seat order."""

    episode_id: str
    env: str
    env_source: str
    seed: int
    players: dict[str, str]
    ended: Ended
    reason: str
    offender: str | None
    winners: tuple[str, ...]
    rewards: dict[str, float]
    turns: int
    tokens: int

    def result(self, seat: str) -> str:
        """``win``, ``loss`` or ``draw`` of a seat, by the game's own verdict; everybody or nobody winning is a draw."""
        if not self.winners or len(self.winners) == len(self.players):
            return "draw"
        return "win" if seat in self.winners else "loss"


class SeatShare(msgspec.Struct, kw_only=True):
    """Results of one seat. Forfeits and truncated games are counted apart: they are not played results."""

    wins: int = 0
    draws: int = 0
    losses: int = 0
    forfeited: int = 0
    won_by_forfeit: int = 0
    truncated: int = 0

    @property
    def played(self) -> int:
        return self.wins + self.draws + self.losses

    @property
    def win_share(self) -> float | None:
        """Wins and half the draws over games played to their end; None before there is one."""
        return (self.wins + self.draws / 2) / self.played if self.played else None


class Payoff(msgspec.Struct, kw_only=True):
    """What a player got against another; forfeits and truncated games apart."""

    wins: int = 0
    draws: int = 0
    losses: int = 0
    reward: float = 0.0
    """Sum over wins, draws and losses."""
    forfeited: int = 0
    won_by_forfeit: int = 0
    truncated: int = 0

    @property
    def played(self) -> int:
        return self.wins + self.draws + self.losses

    @property
    def games(self) -> int:
        """All games with a result, forfeits included."""
        return self.played + self.forfeited + self.won_by_forfeit

    @property
    def mean_reward(self) -> float | None:
        return self.reward / self.played if self.played else None


Tally = SeatShare | Payoff


class LeagueRecords:
    """The games of a run. Threads may add; every `add` is on disk when it returns."""

    def __init__(self, path: Path, db: sqlite3.Connection) -> None:
        self._path, self._db = path, db
        self._writing = threading.Lock()
        self._payoffs: dict[tuple[str, str], Payoff] = defaultdict(lambda: Payoff())
        self._last_counted = 0
        """Row up to which games are in ``_payoffs``: a run asks after every step, and its games are many."""

    @classmethod
    def open(cls, path: Path) -> LeagueRecords:
        """Open or make the file; raises `StoreError` when it is damaged or of a newer layout."""
        with _sqlite_errors(path):
            db = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
        try:
            with _sqlite_errors(path):
                db.execute("PRAGMA journal_mode=DELETE")
                db.execute("PRAGMA synchronous=FULL")
                (version,) = db.execute("PRAGMA user_version").fetchone()
                if version > SCHEMA:
                    raise StoreError(
                        f"{path} has layout {version}, this selfplay knows up to {SCHEMA}: use a newer selfplay"
                    )
                if version < SCHEMA:
                    db.execute("BEGIN IMMEDIATE")
                    db.execute(_TABLE)
                    db.execute(f"PRAGMA user_version={SCHEMA}")
                    db.execute("COMMIT")
        except BaseException:
            db.close()
            raise
        return cls(path, db)

    def add(self, episodes: Iterable[Episode]) -> int:
        """Record games in one transaction; how many were new.

        Raises `StoreError` when a game of the same id is on record with another result.
        """
        new = 0
        with self._writing, _sqlite_errors(self._path), self._transaction():
            for episode in episodes:
                new += self._insert(game_record(episode))
        return new

    def games(self, env: str | None = None, last: int | None = None) -> Iterator[GameRecord]:
        """All games, or the ``last`` ones, in the order they were recorded."""
        where, args = ("", ()) if env is None else ("WHERE env = ?", (env,))
        newest = f"SELECT rowid AS place, * FROM games {where} ORDER BY place DESC LIMIT ?"
        columns = ", ".join(_COLUMNS)
        with _sqlite_errors(self._path):
            rows = self._db.execute(
                f"SELECT {columns} FROM ({newest}) ORDER BY place", (*args, -1 if last is None else last)
            )
            for row in rows:
                yield _from_row(row)

    def after(self, row: int) -> Iterator[tuple[int, GameRecord]]:
        """(row, game) of all games that were recorded behind ``row``, in that order; rows begin at 1."""
        with _sqlite_errors(self._path):
            rows = self._db.execute(
                f"SELECT rowid, {', '.join(_COLUMNS)} FROM games WHERE rowid > ? ORDER BY rowid", (row,)
            )
            for number, *fields in rows:
                yield number, _from_row(fields)

    def __len__(self) -> int:
        with _sqlite_errors(self._path):
            return int(self._db.execute("SELECT COUNT(*) FROM games").fetchone()[0])

    def seat_shares(self, last: int | None = None) -> dict[str, SeatShare]:
        """Seat → results, over all games or the ``last`` ones. Games of a player against itself count: they show a seat's edge."""
        shares: dict[str, SeatShare] = {}
        for game in self.games(last=last):
            for seat in game.players:
                _count(shares.setdefault(seat, SeatShare()), game, seat, [s for s in game.players if s != seat])
        return shares

    def payoffs(self) -> dict[tuple[str, str], Payoff]:
        """(player, opponent) → results of the player. No player is compared with itself, nor a seat of mixed versions.

        With more than two seats every pair at the table is counted: who won beats who did not.
        """
        for row, game in self.after(self._last_counted):
            self._count_pairs(game)
            self._last_counted = row
        return {pair: msgspec.structs.replace(payoff) for pair, payoff in self._payoffs.items()}

    def _count_pairs(self, game: GameRecord) -> None:
        for mine, other in permutations(game.players, 2):
            pair = (game.players[mine], game.players[other])
            if pair[0] != pair[1] and not any(_is_mixed(player) for player in pair):
                _count(self._payoffs[pair], game, mine, [other])

    def close(self) -> None:
        """Idempotent."""
        self._db.close()

    def __enter__(self) -> LeagueRecords:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        self._db.execute("BEGIN IMMEDIATE")
        try:
            yield
        except BaseException:
            if self._db.in_transaction:  # SQLite itself has rolled back when the disk is full
                self._db.execute("ROLLBACK")
            raise
        self._db.execute("COMMIT")

    def _insert(self, game: GameRecord) -> int:
        old = self._db.execute("SELECT * FROM games WHERE episode_id = ?", (game.episode_id,)).fetchone()
        if old is None:
            marks = ", ".join("?" * 12)
            self._db.execute(f"INSERT INTO games VALUES ({marks})", _to_row(game))
            return 1
        known = _from_row(old)
        if known != game:
            raise StoreError(
                f"{self._path}: game {game.episode_id} is on record with another result ({known.rewards}, now {game.rewards})"
            )
        return 0


def game_record(episode: Episode) -> GameRecord:
    """What the league keeps of an episode."""
    versions = _versions_by_seat(episode)
    return GameRecord(
        episode_id=episode.episode_id, env=episode.match.env, env_source=episode.env_source, seed=episode.match.seed,
        players={a.seat: _player(a, versions.get(a.seat, set())) for a in episode.match.seats},
        ended=episode.ended, reason=episode.reason, offender=episode.offender, winners=tuple(sorted(episode.winners)),
        rewards=dict(episode.rewards), turns=len(episode.turns), tokens=sum(episode.num_tokens()),
    )  # fmt: skip


def _versions_by_seat(episode: Episode) -> dict[str, set[int]]:
    out: dict[str, set[int]] = defaultdict(set)
    for turn in episode.turns:
        out[turn.seat].update(span.version for span in turn.spans if span.end > span.start)
    return out


def _player(assignment: SeatAssignment, versions: set[int]) -> str:
    if assignment.player != "llm" or assignment.agent == BASE:
        return assignment.agent
    if isinstance(assignment.pin, int):
        return f"{assignment.agent.removeprefix(PAST)}@{assignment.pin}"
    if not versions:
        return f"{assignment.agent}@?"
    low, high = min(versions), max(versions)
    return f"{assignment.agent}@{low}" if low == high else f"{assignment.agent}@{low}..{high}"


def _is_mixed(player: str) -> bool:
    return ".." in player or player.endswith("@?")


def _count(tally: Tally, game: GameRecord, seat: str, others: Sequence[str]) -> None:
    """Count a game for ``seat`` as seen against ``others``."""
    if game.ended == "truncated":
        tally.truncated += 1
    elif game.ended == "forfeit":
        tally.forfeited += seat not in game.winners
        tally.won_by_forfeit += seat in game.winners and any(other not in game.winners for other in others)
    else:
        result = _against(game, seat, others)
        tally.wins += result == "win"
        tally.draws += result == "draw"
        tally.losses += result == "loss"
        if isinstance(tally, Payoff):
            tally.reward += game.rewards[seat]


def _against(game: GameRecord, seat: str, others: Sequence[str]) -> str:
    """Result of ``seat`` where only ``others`` sit with it: both winning, or neither, is a draw."""
    mine, theirs = seat in game.winners, any(other in game.winners for other in others)
    if len(others) > 1:
        return game.result(seat)
    return "draw" if mine == theirs else "win" if mine else "loss"


_COLUMNS = tuple(GameRecord.__struct_fields__)
_JSON = {"players", "winners", "rewards"}


def _to_row(game: GameRecord) -> tuple[Any, ...]:
    row = [getattr(game, name) for name in _COLUMNS]
    return tuple(_encode(name, value) for name, value in zip(_COLUMNS, row, strict=True))


def _encode(name: str, value: Any) -> Any:
    if name in _JSON:
        return msgspec.json.encode(value).decode()
    return (
        str(value) if name == "seed" else value
    )  # SQLite's integers end at 63 bits, and so do seeds: text is safe for both


def _from_row(row: Sequence[Any]) -> GameRecord:
    fields = dict(zip(_COLUMNS, row, strict=True))
    decoded = {n: msgspec.json.decode(v) if n in _JSON else int(v) if n == "seed" else v for n, v in fields.items()}
    return msgspec.convert(decoded, GameRecord)


@contextmanager
def _sqlite_errors(path: Path) -> Iterator[None]:
    try:
        yield
    except (sqlite3.Error, msgspec.DecodeError, msgspec.ValidationError) as e:
        raise StoreError(f"{path} cannot be read or written: {e}") from e
