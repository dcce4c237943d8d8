"""``games.jsonl``: one line per finished game, appended and fsync'ed; the whole episodes lie in ``episodes/``.

An episode is durable first, its line second. A crash between the two is mended when the log is opened again: the line is made
from the episode. A torn last line is cut away by the writer and passed over by readers; damage anywhere else is an error.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import msgspec

from selfplay.errors import StoreError
from selfplay.ratings import RatedGame
from selfplay.ratings.games import places_of
from selfplay.store.atomic import store_errors
from selfplay.store.episode_log import EpisodeLog
from selfplay.store.parquet import Kind, as_json
from selfplay.tournament.spec import Game
from selfplay.types import Ended, Episode

LOG_NAME = "games.jsonl"
EPISODES = "episodes"


class GameLine(msgspec.Struct, frozen=True, kw_only=True):
    """One finished game. ``failed`` ones raised in the environment: they are listed and never scored."""

    game: str
    cluster: str
    table: tuple[str, ...]
    pair: int
    seats: dict[str, str]
    """Seat → player, in seat order."""
    seed: int
    ended: Ended | Literal["failed"]
    reason: str
    winners: tuple[str, ...] = ()
    rewards: dict[str, float] = {}
    offender: str | None = None
    turns: int = 0
    illegal: dict[str, int] = {}
    """Seat → answers that were no legal move."""
    answers: dict[str, int] = {}
    """Seat → all its answers."""
    tokens: int = 0
    duration_s: float = 0.0
    attempt: int = 0
    episode: int | None = None
    """Number in the episode log."""

    @property
    def scored(self) -> bool:
        """Played to an end that says who was better."""
        return self.ended in ("natural", "forfeit")

    def rated(self) -> RatedGame:
        """The game as ratings take it."""
        seats = tuple(self.seats)
        return RatedGame(
            players=tuple(self.seats.values()),
            places=places_of(seats, self.winners, self.rewards),
            cluster=self.cluster,
        )


GAME_COLUMNS: dict[str, Kind] = {
    "game": "string", "cluster": "string", "pair": "int64", "seed": "int64", "ended": "string", "reason": "string",
    "offender": "string", "seats": "string", "winners": "string", "rewards": "string", "illegal": "string", "turns": "int64",
    "tokens": "int64", "duration_s": "float64", "attempt": "int64", "episode": "int64",
}  # fmt: skip


def game_row(line: GameLine) -> dict[str, Any]:
    """A game as a row of `GAME_COLUMNS`: what is nested as JSON text."""
    nested = ("seats", "winners", "rewards", "illegal")
    return {c: as_json(getattr(line, c)) if c in nested else getattr(line, c) for c in GAME_COLUMNS}


def line_of(game: Game, episode: Episode, number: int) -> GameLine:
    """What the log says of a finished episode."""
    seats = [a.seat for a in episode.match.seats]
    return GameLine(
        game=game.id, cluster=game.cluster, table=game.table, pair=game.pair,
        seats=dict(zip(seats, game.seating, strict=True)), seed=episode.match.seed, ended=episode.ended,
        reason=episode.reason[:500], winners=episode.winners, rewards=episode.rewards, offender=episode.offender,
        turns=len(episode.turns), illegal={s: sum(t.seat == s and not t.legal for t in episode.turns) for s in seats},
        answers={s: sum(t.seat == s for t in episode.turns) for s in seats}, tokens=sum(episode.num_tokens()),
        duration_s=round(episode.duration_s, 4), attempt=episode.match.attempt, episode=number,
    )  # fmt: skip


class GameLog:
    """The games of a tournament folder, for its one writer."""

    def __init__(self, folder: Path, fd: int, lines: dict[str, GameLine], episodes: EpisodeLog) -> None:
        self._path, self._fd, self.lines, self._episodes = folder / LOG_NAME, fd, lines, episodes

    @classmethod
    def open(cls, folder: Path, say: Callable[[str], None]) -> GameLog:
        """Open for appending; what a crash tore is cut away, and ``say`` hears of it."""
        path = folder / LOG_NAME
        with store_errors(path):
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
            lines, end = _parse(path, path.read_bytes())
            os.ftruncate(fd, end)
        episodes = EpisodeLog.open(folder / EPISODES, write=True, say=say)
        return cls(folder, fd, {line.game: line for line in lines}, episodes)

    def episodes(self) -> Iterator[tuple[int, Episode]]:
        """(number, episode) of everything that is durable."""
        return self._episodes.episodes()

    def unlisted(self) -> Iterator[tuple[int, Episode]]:
        """Episodes that are durable but have no line: a crash came between."""
        known = {line.episode for line in self.lines.values()}
        for number, episode in self._episodes.episodes():
            if number not in known:
                yield number, episode

    def add(self, games: Sequence[tuple[Game, Episode, bytes]]) -> list[GameLine]:
        """Record games; on disk when it returns. Raises ValueError for one that is recorded already."""
        numbers = self._episodes.append_many([data for _, _, data in games])
        return self.add_lines([line_of(g, e, n) for (g, e, _), n in zip(games, numbers, strict=True)])

    def add_lines(self, lines: list[GameLine]) -> list[GameLine]:
        """Append lines with one fsync."""
        for line in lines:
            if line.game in self.lines:
                raise ValueError(f"game {line.game} is recorded already")
        with store_errors(self._path):
            view = memoryview(b"".join(msgspec.json.encode(line) + b"\n" for line in lines))
            while view:  # a disk that is filling up takes a part
                view = view[os.write(self._fd, view) :]
            os.fsync(self._fd)
        self.lines.update({line.game: line for line in lines})
        return lines

    def close(self) -> None:
        """Idempotent."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
            self._episodes.close()


def read_lines(folder: Path) -> list[GameLine]:
    """All whole lines of a tournament folder; none when nothing was played yet."""
    path = folder / LOG_NAME
    if not path.is_file():
        return []
    with store_errors(path):
        return _parse(path, path.read_bytes())[0]


def read_episode(folder: Path, number: int) -> Episode:
    """One episode by its number."""
    with EpisodeLog.open(folder / EPISODES, write=False, say=lambda _: None) as log:
        return next(episode for _, episode in log.episodes(number, number + 1))


def _parse(path: Path, data: bytes) -> tuple[list[GameLine], int]:
    """(lines, end of the last whole one). A last line without its end, or that does not parse, is torn."""
    lines: list[GameLine] = []
    end = 0
    parts = data.split(b"\n")
    for number, part in enumerate(parts[:-1], 1):
        try:
            lines.append(msgspec.json.decode(part, type=GameLine))
        except msgspec.DecodeError as e:
            if number == len(parts) - 1 and not parts[-1]:
                break
            raise StoreError(f"{path} is damaged in line {number}: {e}") from e
        end += len(part) + 1
    seen: Mapping[str, int] = {line.game: i for i, line in enumerate(lines)}
    if len(seen) != len(lines):
        raise StoreError(f"{path} holds a game twice: it was written by two processes at once")
    return lines, end
