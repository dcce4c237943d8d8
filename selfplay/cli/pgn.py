"""A recorded game of chess as PGN.

In: an episode whose moves are UCI or SAN, and who sat where. Out: PGN text. The package ``chess`` (it comes with
``pettingzoo[classic]``) reads the moves; raises `UserError` for a game that is no chess.
"""

from __future__ import annotations

from typing import Any

from selfplay.errors import MissingExtraError, UserError
from selfplay.tournament.gamelog import GameLine
from selfplay.types import Episode

RESULTS = {(): "1/2-1/2", (0,): "1-0", (1,): "0-1"}


def pgn(line: GameLine, episode: Episode) -> str:
    """The game's legal moves as PGN; the first seat is White."""
    try:
        import chess
        import chess.pgn
    except ImportError as e:
        raise MissingExtraError("PGN", "envs", "chess") from e
    seats = list(line.seats)
    if "chess" not in episode.match.env or len(seats) != 2:
        raise UserError(f"{episode.match.env} is no chess: PGN is for chess only")
    board, game = chess.Board(), chess.pgn.Game()
    node: Any = game
    for turn in episode.turns:
        if turn.move is not None:
            move = _move(board, turn.move)
            board.push(move)
            node = node.add_variation(move)
    won = tuple(i for i, s in enumerate(seats) if s in line.winners)
    game.headers["Event"] = episode.match.env
    game.headers["White"], game.headers["Black"] = (line.seats[s] for s in seats)
    game.headers["Result"] = RESULTS.get(won, "*") if line.scored else "*"
    game.headers["Termination"] = f"{episode.ended}: {episode.reason}"[:200]
    return f"{game}\n"


def _move(board: Any, text: str) -> Any:
    uci = {m.uci(): m for m in board.legal_moves}
    try:
        return uci[text] if text in uci else board.parse_san(text)
    except ValueError as e:
        raise UserError(f"move {text!r} of this game is neither UCI nor SAN: {e}") from None
