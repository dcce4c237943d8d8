"""What a spectator of ``selfplay play`` sees: turns as they are made, the result, and a summary of several games.

Only what is public is shown: moves, and the game's own transcript. Private views and the words of a model around its
move appear on request. Text of players and games cannot control the terminal.
"""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from selfplay.agent import Decision
from selfplay.play.text import printable
from selfplay.types import Episode, Match, Turn

_COLOURS = ("cyan", "magenta", "green", "yellow", "blue", "red")


class TableView:
    """Prints one game after the other to ``console``."""

    def __init__(self, console: Console, seats: Sequence[str], *, show_private: bool) -> None:
        self._console, self._show_private = console, show_private
        self._style = {s: _COLOURS[i % len(_COLOURS)] for i, s in enumerate(seats)}
        self._round = -1

    def open_game(self, match: Match, source: str) -> None:
        """Say what is played by whom."""
        self._round = -1
        seated = ", ".join(f"{a.seat}: {describe_seat(a.player, a.agent)}" for a in match.seats)
        self._line(f"{match.env} ({source}), seed {match.seed}", "bold")
        self._line(seated)

    def turn(self, decision: Decision, turn: Turn) -> None:
        """Show one turn; the seat's view and full answer only with ``show_private``."""
        style = self._style.get(turn.seat, "")
        if self._show_private and turn.round != self._round:
            self._block(decision.view, "dim")
        self._round = turn.round
        move = turn.move if turn.move is not None else "(illegal answer)"
        line = Text(f"{turn.round + 1:>3} ")
        line.append(f"{turn.seat} ", style)
        line.append(printable(move))
        self._console.print(line, soft_wrap=True)
        if self._show_private and turn.text.strip() != move:
            self._block(turn.text + (f"\n! {turn.note}" if turn.note else ""), "dim")

    def close_game(self, episode: Episode, transcript: str) -> None:
        """Show the public record and the result."""
        self._block(transcript, "")
        self._line(result_line(episode), "bold")
        self._line("")

    def summary(self, episodes: Sequence[Episode]) -> None:
        """A table over several games."""
        table = Table("seat", "player", "won", "mean reward")
        for a in episodes[0].match.seats:
            won = sum(a.seat in e.winners for e in episodes)
            mean = sum(e.rewards[a.seat] for e in episodes) / len(episodes)
            table.add_row(a.seat, describe_seat(a.player, a.agent), f"{won}/{len(episodes)}", f"{mean:+.3f}")
        self._console.print(table)

    def _block(self, text: str, style: str) -> None:
        for line in printable(text).splitlines():
            self._line(f"    {line}", style)

    def _line(self, text: str, style: str = "") -> None:
        self._console.print(Text(printable(text), style), soft_wrap=True)


def describe_seat(player: str, agent: str) -> str:
    """``random``, ``base`` or ``pro@3``: who sits there."""
    return agent if player == "llm" else player


def result_line(episode: Episode) -> str:
    """One line: who won, how it ended, and every seat's reward."""
    if episode.ended == "truncated":
        who = "no result"
    else:
        who = f"{', '.join(episode.winners)} won" if episode.winners else "draw"
    rewards = ", ".join(f"{seat} {reward:+g}" for seat, reward in episode.rewards.items())
    return f"result: {who} ({episode.ended}) | {rewards}" + (f" | {episode.reason}" if episode.reason else "")
