"""From a tournament's folder to its results on disk: ``ratings.json``, ``payoff.csv``, ``report.html``.

In: one folder, or several of the same environment. Out: `Standings` and files, each whole when it is seen.
"""

from __future__ import annotations

import csv
import io
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from selfplay.errors import UserError
from selfplay.store.atomic import write_bytes
from selfplay.tournament.gamelog import GameLine, read_episode, read_lines
from selfplay.tournament.report import report_html
from selfplay.tournament.spec import STOPPED_BY_RESULT, Entrant, TournamentSpec, rotations
from selfplay.tournament.standings import Standings, standings
from selfplay.tournament.words import counted


class Found(msgspec.Struct, frozen=True, kw_only=True):
    """What lies in one or more folders."""

    spec: TournamentSpec
    lines: tuple[GameLine, ...]
    anchors: dict[str, float]


def read_tournament(folder: Path, others: Sequence[Path] = (), anchors: Mapping[str, float] | None = None) -> Found:
    """Read ``folder`` and merge ``others`` into it. Raises `UserError` when they do not belong together."""
    spec = TournamentSpec.load(folder)
    lines = {line.game: line for line in read_lines(folder)}
    players = {p.name: p for p in spec.players}
    for other in others:
        more = TournamentSpec.load(other)
        if (more.env, more.env_params, more.seats) != (spec.env, spec.env_params, spec.seats):
            raise UserError(f"{other} and {folder} are not of one game: {_game(more)}, and {_game(spec)}")
        for player in more.players:
            _merge_player(players, player, other)
        lines |= {line.game: line for line in read_lines(other)}
        if more.origin != "tournament":
            spec = msgspec.structs.replace(spec, origin=more.origin)
    spec = msgspec.structs.replace(spec, players=tuple(players.values()))
    chosen = dict(anchors or spec.anchors)
    if missing := [a for a in chosen if a not in players]:
        raise UserError(f"{missing[0]!r} does not play; the players are {', '.join(players)}")
    return Found(spec=spec, lines=tuple(lines[g] for g in sorted(lines)), anchors=chosen)


def _game(spec: TournamentSpec) -> str:
    params = ", ".join(f"{k}={v}" for k, v in sorted(spec.env_params.items()))
    return f"{spec.env} ({params})" if params else spec.env


def _merge_player(players: dict[str, Entrant], player: Entrant, other: Path) -> None:
    known = players.setdefault(player.name, player)
    if known.identity != player.identity:
        raise UserError(f"{player.name} of {other} is another player than the one of that name: rate them apart")


def conclude(found: Found) -> Standings:
    """The standings of what was found."""
    result = standings(found.lines, [p.name for p in found.spec.players], found.anchors)
    remarks = list(result.ratings.remarks)
    if lopsided := num_incomplete(found):
        remarks.append(f"{counted(lopsided, 'pair')} without a result in every seating of the deal")
    if found.spec.origin != "tournament":
        remarks.append(STOPPED_BY_RESULT)
    ratings = msgspec.structs.replace(result.ratings, remarks=tuple(remarks))
    return msgspec.structs.replace(result, ratings=ratings)


def num_incomplete(found: Found) -> int:
    """Pairs with a result in some of their seatings only; the gate's are compared otherwise and are not counted."""
    if found.spec.origin == "gate":
        return 0
    played = Counter((line.table, line.cluster) for line in found.lines if line.scored)
    return sum(num < len(rotations(table)) for (table, _), num in played.items() if not found.spec.seating)


def write_results(folder: Path, found: Found, result: Standings) -> None:
    """Write all result files of a tournament."""
    write_bytes(folder / "ratings.json", msgspec.json.format(msgspec.json.encode(result), indent=2) + b"\n")
    write_bytes(folder / "payoff.csv", payoff_csv(found.spec, result).encode())
    write_bytes(
        folder / "report.html", report_html(found.spec, found.lines, result, lambda n: read_episode(folder, n)).encode()
    )


def payoff_csv(spec: TournamentSpec, result: Standings) -> str:
    """Mean score of the row player against the column player; empty where they did not meet."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    names = [p.name for p in spec.players]
    writer.writerow(["player", *names])
    for name in names:
        scores = [result.meetings[name].get(other) for other in names]
        writer.writerow([name, *("" if m is None or m.score is None else f"{m.score:.6f}" for m in scores)])
    return out.getvalue()
