"""A recorded game as text: everything every seat is told, and every move. Written once, replayed line by line.

To renew the records after a rule was changed on purpose:  python tests/playthrough.py
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from selfplay.registry import make_environment
from selfplay.types import Scalar

GOLDEN = Path(__file__).parent / "golden"
GAMES: dict[str, tuple[str, Mapping[str, Scalar], int, tuple[str, ...]]] = {
    "tictactoe-v0": ("tictactoe-v0", {}, 0, ("5", "my square is 1", "9", "3", "2", "8", "4", "6", "7")),
    "kuhn-poker-v0": ("kuhn-poker-v0", {}, 3, ("pass", "BET", "I bet")),
    "kuhn-poker-v0-3": ("kuhn-poker-v0", {"players": 3}, 5, ("pass", "pass", "bet", "bet", "pass")),
    "leduc-poker-v0": ("leduc-poker-v0", {}, 1, ("check", "raise", "I raise", "call", "Raise!", "raise", "call")),
    "leduc-poker-v0-fold": ("leduc-poker-v0", {}, 2, ("raise", "raise", "fold")),
    "nim-v0": ("nim-v0", {}, 0, ("3", "1", "I take 3", "2", "2")),
    "nim-v0-misere": ("nim-v0", {"preset": "marienbad"}, 0, ("d7", "c4", "c1", "B1", "b2", "a1")),
    "prisoners-dilemma-v0": (
        "prisoners-dilemma-v0", {"rounds": 3}, 0, ("cooperate", "defect", "Defect", "defect", "defect", "I cooperate."),
    ),
    "prisoners-dilemma-v0-noisy": (
        "prisoners-dilemma-v0", {"rounds": 4, "continuation": 0.9, "noise": 0.4}, 1, ("cooperate",) * 8,
    ),
    "connect-four-v0": ("connect-four-v0", {}, 0, ("4", "3", "Column 4!", "3", "4", "3", "5", "3")),
    "negotiation-v0": ("negotiation-v0", {}, 1, ("I keep 110", "211", "204", "accept")),
    "liars-dice-v0": (
        "liars-dice-v0", {"players": 3, "dice": 1, "wild": True}, 4,
        ("1x3", "2x3", "Liar!", "1x6", "2x6", "liar"),
    ),
    "signalling-v0": (
        "signalling-v0", {"objects": 2, "signals": 2, "rounds": 3}, 0, ("ka", "apple", "lo", "boat", "ka", "The apple."),
    ),
    "taboo-v0": ("taboo-v0", {"words": 3}, 5, ("Everest.", "bread", "alps", "I guess mountain")),
    "werewolf-v0": ("werewolf-v0", {"players": 4}, 0, ("ann", "bob", "cid", "bob", "bob", "cid", "bob", "bob")),
    "debate-v0": (
        "debate-v0", {"rounds": 2, "max_words": 8}, 11,
        ("It saves time.", "It costs nerve.\n> And more.", "It saves time and money for all of us, always.", "So you say."),
    ),
}  # fmt: skip


def record(name: str) -> str:
    """The whole game as text."""
    env_id, params, seed, answers = GAMES[name]
    game = make_environment(env_id, params, seed)
    lines = [f"{env_id} {dict(params)} seed {seed}", f"seats: {list(game.seats)}"]
    for seat in game.seats:
        lines.append(f"rules({seat}): {game.rules(seat)!r}")
    script = iter(answers)
    while movers := list(game.to_move()):
        lines.append(f"to move: {movers}")
        for seat in game.seats:
            lines.append(f"  view({seat}): {game.view(seat)!r}")
            if seat in movers:
                lines.append(f"  legal({seat}): {game.legal_moves(seat)!r}")
        moves = {}
        for seat in movers:
            answer = next(script)
            moves[seat] = game.parse(seat, answer)
            lines.append(f"  {seat} says {answer!r}, plays {moves[seat]!r}")
        game.step(moves)
    assert next(script, None) is None, f"{name}: the game is over, answers are left"
    lines.append(f"to move: {list(game.to_move())}")
    questions = game.jury_questions()
    lines += [f"jury: {q!r}" for q in questions]
    if questions:
        game.hear_jury([{"A": 0.75, "B": 0.25}, {"A": 0.5, "B": 0.5}])
    lines.append(f"outcome: {game.outcome()!r}")
    lines.append(f"transcript: {game.transcript()!r}")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    GOLDEN.mkdir(exist_ok=True)
    for game_name in GAMES:
        (GOLDEN / f"{game_name}.txt").write_text(record(game_name), "utf-8")
