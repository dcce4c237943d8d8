"""The gate's games as the folder of a tournament, so that ``selfplay rate`` and ``selfplay replay`` show them like any other's.

    runs/NAME/gate/     tournament.json, games.jsonl, episodes/

In: games of the gate that came to a result, before the record and the worker hear of it. Out: their lines and whole episodes; and, when
a run goes on, those that a crash kept from the record. Players are the snapshots that met, and bots; who comes anew is added.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from msgspec.structs import replace

from selfplay.league.gate import GateGame
from selfplay.league.records import LeagueRecords, game_record
from selfplay.store.adapters import AdapterStore
from selfplay.store.atomic import store_errors
from selfplay.tournament.gamelog import GameLog, line_of
from selfplay.tournament.spec import SPEC_NAME, Entrant, Game, TournamentSpec
from selfplay.types import BASE, Episode, PolicyVersion, SeatAssignment

ReadIndex = Callable[[int], GateGame | None]
"""From a match's number to the game of the gate that it is."""


class GateLog:
    """One writer; `add` is durable when it returns."""

    def __init__(
        self, folder: Path, spec: TournamentSpec, store: AdapterStore, read: ReadIndex, say: Callable[[str], None]
    ) -> None:
        """``spec``: the run's game, whose players are those that are in ``folder`` already."""
        with store_errors(folder):
            folder.mkdir(exist_ok=True)
        known = TournamentSpec.load(folder).players if (folder / SPEC_NAME).is_file() else ()
        self._folder, self._store, self._read = folder, store, read
        self._spec = replace(spec, players=known, origin="gate")
        self._log = GameLog.open(folder, say)
        for number, episode in self._log.unlisted():
            self._log.add_lines([line_of(self._game(episode), episode, number)])

    def add(self, games: Sequence[tuple[Episode, bytes]]) -> None:
        """Games that are over, each with its encoding; one that a worker sends again is here already."""
        self._introduce([episode for episode, _ in games])
        found = [(self._game(episode), episode, data) for episode, data in games]
        self._log.add([g for g in found if g[0].id not in self._log.lines])

    def complete(self, records: LeagueRecords) -> int:
        """Put into ``records`` the games that a crash, or the loss of the file, kept from there; how many."""
        known = {game.episode_id for game in records.games()}
        return records.add([e for _, e in self._log.episodes() if e.episode_id not in known])

    def close(self) -> None:
        """Idempotent."""
        self._log.close()

    def _game(self, episode: Episode) -> Game:
        """Both halves of a pair are one cluster, whoever else sits at the table."""
        found = self._read(episode.match.index)
        if found is None:  # of a run whose agents were others
            found = GateGame(agent="gate", version=0, pair=episode.match.index, half=0)
        candidate = f"{found.agent}@{found.version}"
        return Game(
            id=f"{candidate}.{found.pair}.{found.half}", table=(candidate,), pair=found.pair,
            seating=tuple(game_record(episode).players.values()),
        )  # fmt: skip

    def _introduce(self, episodes: Sequence[Episode]) -> None:
        """Whoever is not among the players yet is one from now on."""
        known = {p.name for p in self._spec.players}
        seated = [
            (name, seat)
            for e in episodes
            for name, seat in zip(game_record(e).players.values(), e.match.seats, strict=True)
        ]
        new = {name: self._entrant(name, seat) for name, seat in seated if name not in known}
        if new:
            self._spec = replace(self._spec, players=(*self._spec.players, *new.values()))
            self._spec.save(self._folder)

    def _entrant(self, name: str, seat: SeatAssignment) -> Entrant:
        options = dict(seat.options)
        if seat.player != "llm":
            return Entrant(name=name, player=seat.player, options=options)
        if seat.agent == BASE:
            return Entrant(name=name, player="llm", options=options)
        version = PolicyVersion.parse(name)
        return Entrant(
            name=name, player="llm", agent=version.agent, version=version.version, options=options,
            adapter=str(self._store.path(version).resolve()), digest=self._store.info(version).digest,
        )  # fmt: skip
