"""``selfplay replay``: a recorded game of a tournament or a run, turn by turn, as `selfplay play` would have shown it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click
import msgspec

from selfplay.errors import UserError

if TYPE_CHECKING:
    from selfplay.tournament.gamelog import GameLine
    from selfplay.types import Episode


def show_game(folder: Path, game: str, *, show_private: bool, as_pgn: bool, as_json: bool) -> None:
    """Print one game. Raises `UserError` for one that is not there, or a beginning that fits several."""
    line, episode = _of_run(folder, game) if (folder / "manifest.json").is_file() else _of_tournament(folder, game)
    if as_json:
        click.echo(msgspec.json.encode({"game": line, "episode": episode}).decode())
        return
    if as_pgn:
        from selfplay.cli.pgn import pgn

        click.echo(pgn(line, episode), nl=False)
        return
    for text in transcript(line, episode, show_private=show_private):
        click.echo(text)


def _of_tournament(folder: Path, game: str) -> tuple[GameLine, Episode]:
    from selfplay.tournament.gamelog import read_episode, read_lines
    from selfplay.tournament.spec import TournamentSpec

    TournamentSpec.load(folder)
    line = find_line(read_lines(folder), game)
    if line.episode is None:
        raise UserError(f"game {line.game} failed and has no record of its turns: {line.reason}")
    return line, read_episode(folder, line.episode)


def _of_run(folder: Path, game: str) -> tuple[GameLine, Episode]:
    """A training game by its episode's id, or by its number in the log."""
    from selfplay.league.records import game_record
    from selfplay.store.episode_log import EpisodeLog
    from selfplay.store.run_folder import RunFolder
    from selfplay.tournament.gamelog import line_of
    from selfplay.tournament.spec import Game

    with EpisodeLog.open(RunFolder.open(folder).episodes, write=False, say=lambda _: None) as log:
        if game.isdigit() and len(game) < 12 and 1 <= int(game) <= log.next_seq:
            found = next(log.episodes(int(game) - 1, int(game)), None)
        else:
            found = next(((n, e) for n, e in log.episodes() if e.episode_id == game), None)
        if found is None:
            raise UserError(
                f"no game {game!r} among {log.next_seq} of run {folder}: give a number from 1, or an id such as 17.0; games of the "
                f"gate are in {folder / 'gate'}"
            )
    number, episode = found
    seating = tuple(game_record(episode).players.values())
    return line_of(Game(id=episode.episode_id, table=(), pair=0, seating=seating), episode, number), episode


def find_line(lines: list[GameLine], game: str) -> GameLine:
    """The line of a game by the beginning of its id, or by its number in the log."""
    if game.isdigit() and len(game) < 8 and 1 <= int(game) <= len(lines):
        return lines[int(game) - 1]
    found = [line for line in lines if line.game == game] or [line for line in lines if line.game.startswith(game)]
    if len(found) == 1:
        return found[0]
    if not found:
        raise UserError(
            f"no game {game!r} among {len(lines)}: give the beginning of an id of games.jsonl, or a number from 1"
        )
    raise UserError(f"{len(found)} games begin with {game!r}: give more of the id")


def transcript(line: GameLine, episode: Episode, *, show_private: bool) -> list[str]:
    """The game in lines: who sat where, each turn, the end. With ``show_private`` what each seat was shown as well."""
    from selfplay.play.text import printable

    out = [f"game {line.game}  {episode.match.env}  seed {line.seed}", _seating(line), ""]
    views = _private_views(episode) if show_private else {}
    for number, turn in enumerate(episode.turns):
        if number in views:
            out += [f"    │ {text}" for text in printable(views[number]).splitlines()]
        answer = printable(turn.text if show_private or turn.move is None else turn.move)
        out.append(f"{number + 1:>3}  {turn.seat} ({line.seats[turn.seat]}): {answer}")
        if turn.move is None:
            out.append(f"     illegal: {printable(turn.note)}")
    for record in episode.jury:
        shares = ", ".join(f"{label} {p:.2f}" for label, p in zip(record.labels, record.probabilities, strict=True))
        out.append(f"jury {record.juror}: {shares}")
    rewards = ", ".join(f"{s} {r:+g}" for s, r in episode.rewards.items())
    return [*out, "", f"{episode.ended}: {printable(episode.reason)}  ({rewards})"]


def _seating(line: GameLine) -> str:
    return "  ".join(f"{seat}: {player}" for seat, player in line.seats.items())


def _private_views(episode: Episode) -> dict[int, str]:
    """Turn → what its seat was shown: the game is played again with the recorded moves, without any model."""
    from selfplay.play.table import Table
    from selfplay.registry import make_environment

    match = episode.match
    table = Table(match.env, make_environment(match.env, match.env_params, match.seed), match.seed)
    decisions = {d.seat: d for d in table.open_round()}
    views: dict[int, str] = {}
    told: set[str] = set()
    moves: dict[str, str] = {}
    for number, turn in enumerate(episode.turns):
        decision = decisions.get(turn.seat)
        if decision is None:
            break
        views[number] = decision.view if turn.seat in told else f"{decision.rules}\n{decision.view}"
        told.add(turn.seat)
        if turn.move is not None:
            moves[turn.seat] = turn.move
        if len(moves) == len(decisions):
            decisions = {d.seat: d for d in table.open_round(moves)}
            moves = {}
    return views
