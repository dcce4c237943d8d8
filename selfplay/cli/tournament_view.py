"""The terminal's view of a tournament: progress on standard error, the standings as a table or one JSON object on standard output."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import click
import msgspec

if TYPE_CHECKING:
    from selfplay.launch.tournament import Played
    from selfplay.tournament.gamelog import GameLine
    from selfplay.tournament.spec import TournamentSpec
    from selfplay.tournament.standings import Standings

EVERY_S = 0.5
PLAIN_WIDTH = 130
"""Columns where no terminal says how many it has."""


class Progress:
    """One line on standard error while games are played; nothing when that is no terminal but for the end."""

    def __init__(self, *, quiet: bool) -> None:
        self._live = sys.stderr.isatty() and not quiet
        self._shown_at, self._began = 0.0, time.monotonic()
        self._line = ""

    def game(self, line: GameLine, num_done: int, num_planned: int) -> None:
        """A game is finished."""
        took = time.monotonic() - self._began
        self._line = f"{num_done} of {num_planned} games, {took:.0f} s; last: {line.ended}, {line.reason[:60]}"
        if self._live and time.monotonic() - self._shown_at > EVERY_S:
            self._shown_at = time.monotonic()
            print(f"\r\x1b[2K{self._line}", end="", file=sys.stderr, flush=True)

    def close(self) -> None:
        """The last state, on a line of its own."""
        if self._line:
            print(("\r\x1b[2K" if self._live else "") + self._line, file=sys.stderr, flush=True)


def show(
    spec: TournamentSpec, result: Standings, folder: Path | None, *, as_json: bool, played: Played | None = None
) -> None:
    """Print the standings; of a gauntlet also the challenger's record by seat."""
    if as_json:
        body = {"env": spec.env, "folder": str(folder) if folder else None, "session": played, "standings": result}
        click.echo(msgspec.json.encode(body).decode())
        return
    from rich.console import Console

    console = Console(highlight=False, width=None if sys.stdout.isatty() else PLAIN_WIDTH)
    console.print(_table(spec, result))
    if spec.challenger:
        console.print()
        console.print(_seat_table(spec.challenger, result))
    console.print()
    for line in _below(result, folder, played):
        console.print(line, markup=False)


def _table(spec: TournamentSpec, result: Standings) -> object:
    from rich.table import Table
    from rich.text import Text

    from selfplay.tournament.words import elo_text, interval_text, rank_text, reward_text
    from selfplay.wire.text import safe_text

    table = Table(
        title=f"{spec.env}, {result.ratings.num_games} rated games", title_justify="left", box=None, pad_edge=False
    )
    for name in ("rank", "player", "Elo", "95 %", "games", "score", "reward", "no forfeits", "illegal", "remarks"):
        table.add_column(name, justify="left" if name in ("player", "remarks") else "right")
    without = {p.player: p for p in result.without_forfeits.players}
    for row in result.ratings.players:
        conduct = result.conduct[row.player]
        table.add_row(
            rank_text(row), Text(safe_text(row.player)), elo_text(row.elo), interval_text(row), str(row.games),
            "–" if row.score is None else f"{row.score:.3f}", reward_text(result.rewards[row.player]), elo_text(without[row.player].elo),
            f"{conduct.illegal_share:.1%}", Text("; ".join(row.flags)),
        )  # fmt: skip
    return table


def _seat_table(player: str, result: Standings) -> object:
    from rich.table import Table
    from rich.text import Text

    from selfplay.tournament.words import share_text
    from selfplay.wire.text import safe_text

    title = Text(f"{safe_text(player)} by seat, shares of games (95 %)", style="table.title")
    table = Table(title=title, title_justify="left", box=None, pad_edge=False)
    for name in ("against", "as", "games", "won", "drawn", "not lost"):
        table.add_column(name, justify="left" if name in ("against", "as") else "right")
    for row in (r for r in result.by_seat if r.player == player):
        table.add_row(
            Text(safe_text(row.opponent)),
            Text(safe_text(row.seat)),
            str(row.games),
            *map(share_text, (row.won, row.drawn, row.not_lost)),
        )
    return table


def _below(result: Standings, folder: Path | None, played: Played | None) -> list[str]:
    from selfplay.tournament.report import verdict
    from selfplay.tournament.words import counted, seat_texts

    ratings = result.ratings
    lines = [
        verdict(result),
        f"Elo: {ratings.reference}; ratings of {counted(ratings.num_clusters, 'pair')}, draws {ratings.draw_share:.0%}",
    ]
    if len(ratings.seat_effects) == 2:
        lines.append(f"first seat: {seat_texts(ratings)[0]}")
    if result.cyclic_share is not None:
        lines.append(f"cyclic share of the head-to-head record: {result.cyclic_share:.0%}")
    lines += [f"note: {r}" for r in ratings.remarks]
    odd = {k: v for k, v in result.counts.items() if k != "natural"}
    if odd:
        lines.append("games that did not end naturally: " + ", ".join(f"{v} {k}" for k, v in odd.items()))
    if played is not None:
        again = ", ".join(f"{v} {k}" for k, v in played.replayed.items()) or "none"
        lines.append(f"{played.outcome}: {played.num_new} games in this session; attempts played again: {again}")
    if folder is not None:
        lines.append(f"report: {folder / 'report.html'}")
    return lines
