"""How PettingZoo's observations and actions read as text, and what the library does not say of its classic games."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

RANKS = ("A", "2", "3", "4", "5", "6", "7", "8", "9", "T", "J", "Q", "K")
SUITS = ("s", "h", "d", "c")
GO_COLUMNS = "ABCDEFGHJKLMNOPQRST"


class Known(msgspec.Struct, frozen=True, kw_only=True):
    """What a game's module leaves unsaid: its rewards and how long it can last."""

    zero_sum: bool = False
    reward_range: tuple[float, float] = (-1e6, 1e6)
    others: float = 0.0
    """What the other seats get when one forfeits, in games that are not zero-sum."""
    max_turns: int = 1000


class GameForm:
    """The default: numbers as numbers, arrays as grids. Subclass, and set ``form`` of a game's class, to replace it."""

    def rules(self, env: Any, seat: str) -> str:
        """Told to the seat once."""
        name = str(env.metadata.get("name", "a game")).rpartition("_v")[0].replace("_", " ") or "a game"
        return f"You play {name} as {seat}. Answer with one legal move."

    def view(self, env: Any, seat: str, observed: Any) -> str:
        """What the seat is shown."""
        if isinstance(observed, Mapping):
            parts = [f"{k}: {_array_text(v)}" for k, v in observed.items() if k != "action_mask"]
            return "\n".join(parts)
        return f"observation: {_array_text(observed)}"

    def move(self, env: Any, seat: str, number: int) -> str:
        """The name of an action."""
        return str(number)


def _array_text(value: Any) -> str:
    """An array: up to two dimensions as a grid, deeper ones layer by layer."""
    shape = getattr(value, "shape", ())
    if not shape:
        return f"{value}"
    if len(shape) == 1:
        return " ".join(f"{float(x):g}" for x in value)
    if len(shape) == 2:
        return "\n" + "\n".join(" ".join(f"{float(x):g}" for x in row) for row in value)
    return "\n" + "\n\n".join(_array_text(value[..., i]).strip("\n") for i in range(shape[-1]))


class TicTacToeForm(GameForm):
    """Squares 1 to 9, in the order of the library's numbers."""

    def view(self, env: Any, seat: str, observed: Any) -> str:
        mine, theirs = observed["observation"][..., 0], observed["observation"][..., 1]
        me, you = ("X", "O") if env.possible_agents[0] == seat else ("O", "X")
        rows = [[self._cell(r, c, mine, theirs, me, you) for c in range(3)] for r in range(3)]
        return "\n".join(" ".join(row) for row in rows) + f"\nYou are {me}."

    def _cell(self, row: int, column: int, mine: Any, theirs: Any, me: str, you: str) -> str:
        if mine[row, column]:
            return me
        return you if theirs[row, column] else str(3 * row + column + 1)

    def move(self, env: Any, seat: str, number: int) -> str:
        return str(number + 1)


class ConnectFourForm(GameForm):
    """A grid under columns 1 to 7."""

    def view(self, env: Any, seat: str, observed: Any) -> str:
        planes = observed["observation"]
        me, you = ("X", "O") if env.possible_agents[0] == seat else ("O", "X")
        rows = [" ".join(me if p[0] else you if p[1] else "." for p in row) for row in planes]
        return "\n".join(["1 2 3 4 5 6 7", *rows, f"You are {me}."])

    def move(self, env: Any, seat: str, number: int) -> str:
        return str(number + 1)


class RockPaperScissorsForm(GameForm):
    """Actions and the other's last action by name."""

    names = ("rock", "paper", "scissors", "lizard", "spock")

    def view(self, env: Any, seat: str, observed: Any) -> str:
        number = int(observed)
        count = int(env.action_space(seat).n)
        return "First round." if number >= count else f"The other played {self.move(env, seat, number)}."

    def move(self, env: Any, seat: str, number: int) -> str:
        return self.names[number] if number < len(self.names) else f"action {number}"


class ChessForm(GameForm):
    """The board as a grid, White below, and moves in UCI letters, for example e2e4."""

    def view(self, env: Any, seat: str, observed: Any) -> str:
        board = env.unwrapped.board
        colour = "White" if env.possible_agents[0] == seat else "Black"
        rows = [f"{8 - i} {row}" for i, row in enumerate(str(board).split("\n"))]
        return "\n".join([*rows, "  a b c d e f g h", f"You are {colour} (capital letters are White)."])

    def move(self, env: Any, seat: str, number: int) -> str:
        from pettingzoo.classic.chess.chess_utils import action_to_move

        return str(action_to_move(env.unwrapped.board, number, env.possible_agents.index(seat)).uci())


class GoForm(GameForm):
    """The board as a grid, points like D4, and pass."""

    def view(self, env: Any, seat: str, observed: Any) -> str:
        planes, size = observed["observation"], observed["observation"].shape[0]
        me, you = ("X", "O") if env.possible_agents[0] == seat else ("O", "X")
        rows = [
            f"{size - i:>2} " + " ".join(me if p[0] else you if p[1] else "." for p in row)
            for i, row in enumerate(planes)
        ]
        return "\n".join([*rows, "   " + " ".join(GO_COLUMNS[:size]), f"You are {me} (X is Black)."])

    def move(self, env: Any, seat: str, number: int) -> str:
        size = env.observation_space(seat)["observation"].shape[0]
        if number == size * size:
            return "pass"
        return f"{GO_COLUMNS[number % size]}{size - number // size}"


class LeducForm(GameForm):
    """Cards by name and the chips of both."""

    moves = ("call", "raise", "fold", "check")

    def view(self, env: Any, seat: str, observed: Any) -> str:
        bits = observed["observation"]
        hand, public = ("".join(r for r, b in zip("JQK", bits[i : i + 3], strict=True) if b) or "none" for i in (0, 3))
        mine, theirs = int(bits[6:21].argmax()), int(bits[21:36].argmax())
        return f"Your card: {hand}. Public card: {public}. Your chips in the pot: {mine}, the other's: {theirs}."

    def move(self, env: Any, seat: str, number: int) -> str:
        return self.moves[number]


class HoldemForm(GameForm):
    """The cards a seat sees, own and public ones, and the raises or chips."""

    def __init__(self, moves: Sequence[str], chips: bool) -> None:
        self._moves, self._chips = moves, chips

    def view(self, env: Any, seat: str, observed: Any) -> str:
        bits = observed["observation"]
        state = env.unwrapped.env.get_state(env.possible_agents.index(seat))["raw_obs"]
        hand, public = (" ".join(_card(c) for c in state[k]) or "none" for k in ("hand", "public_cards"))
        if self._chips:
            money = f"Your chips in the pot: {bits[52]:g}, the most: {bits[53]:g}."
        else:
            raises = [int(bits[i : i + 5].argmax()) for i in range(52, 72, 5)]
            money = f"Raises per round: {' '.join(map(str, raises))}."
        return f"Your cards: {hand}. Public cards: {public}. {money}"

    def move(self, env: Any, seat: str, number: int) -> str:
        return self._moves[number]


def _card(name: str) -> str:
    """The library writes suit first."""
    return f"{name[1]}{name[0].lower()}"


class HanabiForm(GameForm):
    """The text and move names of OpenSpiel, which plays this game underneath."""

    def view(self, env: Any, seat: str, observed: Any) -> str:
        return str(env.unwrapped.hanabi_env.game_state.observation_string(env.possible_agents.index(seat))).rstrip()

    def move(self, env: Any, seat: str, number: int) -> str:
        return str(env.unwrapped.hanabi_env.game_state.action_to_string(env.possible_agents.index(seat), number))


_WIN = Known(zero_sum=True, reward_range=(-1.0, 1.0), max_turns=200)
GAMES: Mapping[str, tuple[Known, GameForm]] = {
    "tictactoe_v3": (_WIN, TicTacToeForm()),
    "connect_four_v3": (_WIN, ConnectFourForm()),
    "rps_v2": (Known(zero_sum=True, reward_range=(-1e4, 1e4), max_turns=100_000), RockPaperScissorsForm()),
    "chess_v6": (Known(zero_sum=True, reward_range=(-1.0, 1.0), max_turns=6000), ChessForm()),
    "go_v5": (Known(zero_sum=True, reward_range=(-1.0, 1.0), max_turns=1500), GoForm()),
    "leduc_holdem_v4": (Known(zero_sum=True, reward_range=(-7.0, 7.0), max_turns=20), LeducForm()),
    "texas_holdem_v4": (
        Known(zero_sum=True, reward_range=(-50.0, 50.0), max_turns=100),
        HoldemForm(("call", "raise", "fold", "check"), chips=False),
    ),
    "texas_holdem_no_limit_v6": (
        Known(zero_sum=True, reward_range=(-100.0, 100.0), max_turns=100),
        HoldemForm(("fold", "call", "raise half pot", "raise full pot", "all in"), chips=True),
    ),
    "hanabi_v5": (Known(reward_range=(-25.0, 25.0), max_turns=200), HanabiForm()),
}
"""Game module → what is known of it, and its form."""
