"""``selfplay env replay``: play recorded episodes again, move by move, or say why they cannot be."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING

import click
import msgspec

from selfplay.errors import EnvironmentFault, UserError

if TYPE_CHECKING:
    from selfplay.types import Episode


@click.command("replay")
@click.argument("file")
def command(file: str) -> int:
    """Replay the episodes of FILE, as `selfplay play --json` writes them.

    Every move is made again in a new game of the same seed. An episode of another version of its environment is not
    replayed; the line says which version it needs. Exit 1 when any was not, or came out differently.
    """
    from selfplay.play.text import printable
    from selfplay.types import Episode

    try:
        recorded = msgspec.json.decode(Path(file).read_bytes(), type=dict[str, msgspec.Raw])
        episodes = msgspec.json.decode(recorded.get("episodes", b""), type=tuple[Episode, ...])
    except OSError as e:
        raise UserError(f"{file} cannot be read: {e.strerror}") from None
    except msgspec.DecodeError as e:
        raise UserError(f"{file} does not hold episodes as `selfplay play --json` writes them: {e}") from None
    num_wrong = 0
    for episode in episodes:
        reason = why_not(episode) or next(_differences(episode), "")
        num_wrong += bool(reason)
        click.echo(f"{episode.match.env} seed {episode.match.seed}: {printable(reason) or 'replayed, the same result'}")
    return 1 if num_wrong else 0


def why_not(episode: Episode) -> str:
    """Why an episode cannot be replayed with what is installed; empty when it can."""
    from selfplay.registry import environment_source

    try:
        now = environment_source(episode.match.env)
    except UserError as e:
        return f"not replayed, its environment cannot be had: {e}"
    if now == episode.env_source:
        return ""
    remedy = (
        ""
        if episode.env_source.startswith("file ")
        else "; install that version, for example with  selfplay env install"
    )
    return f"not replayed: it was played with {episode.env_source}, installed is {now}{remedy}"


def _differences(episode: Episode) -> Iterator[str]:
    from selfplay.play.table import Table
    from selfplay.registry import make_environment

    match = episode.match
    try:
        table = Table(match.env, make_environment(match.env, match.env_params, match.seed), match.seed)
        decisions = table.open_round()
        for number, turns in groupby(episode.turns, key=lambda t: t.round):
            moves = {t.seat: t.move for t in turns if t.move is not None}
            if set(moves) != {d.seat for d in decisions}:
                break  # a forfeit or a cut: the game ended in this round
            decisions = table.open_round({seat: table.parse(seat, move) for seat, move in moves.items()})
            if not decisions and number != episode.turns[-1].round:
                yield f"differs: the game is over after round {number}"
        if episode.ended == "natural":
            if decisions:
                yield "differs: the game is not over"
            if episode.jury:
                table.hear_jury([dict(zip(j.labels, j.probabilities, strict=True)) for j in episode.jury])
            outcome = table.outcome()
            if outcome.rewards != episode.rewards:
                yield f"differs: rewards are {outcome.rewards}, recorded {episode.rewards}"
        table.close()
    except EnvironmentFault as e:
        yield f"differs: {e}"
