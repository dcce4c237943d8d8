"""How positions and moves of OpenSpiel read as text: a default, and better words for games whose own are bare digits."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

CARDS = "9TJQKA"


class StateForm:
    """The default: the library's own strings. Subclass, and set ``form`` of a game's class, to replace it."""

    def rules(self, game: Any, player: int) -> str:
        """Told to the player once."""
        kind = game.get_type()
        return f"You play {kind.long_name} as player {player} of {game.num_players()}. Answer with one legal move."

    def view(self, state: Any, player: int) -> str:
        """What the player knows: its information state, or its observation where nothing is hidden."""
        kind = state.get_game().get_type()
        if kind.information.name == "PERFECT_INFORMATION":
            board = state.observation_string(player) if kind.provides_observation_string else str(state)
            return f"{board.rstrip()}\nYou are player {player}."
        if kind.provides_information_state_string:
            return str(state.information_state_string(player)).rstrip() or "Nothing has happened yet."
        return str(state.observation_string(player)).rstrip()

    def move(self, state: Any, player: int, action: int) -> str:
        """The name of a move."""
        return str(state.action_to_string(player, action))


class KuhnForm(StateForm):
    """Card by name and the betting so far: ``Card: K. History: pass, bet.``"""

    def view(self, state: Any, player: int) -> str:
        known = state.information_state_string(player)
        players = state.num_players()
        ranks = ("J", "Q", "K") if players == 2 else CARDS[max(0, 4 - players) : 5]
        history = ", ".join({"p": "pass", "b": "bet"}[c] for c in known[1:]) or "none"
        return f"Card: {ranks[int(known[0])]}. History: {history}."

    def move(self, state: Any, player: int, action: int) -> str:
        return ("pass", "bet")[action]


class LeducForm(StateForm):
    """Cards by name; each round's moves by name."""

    def view(self, state: Any, player: int) -> str:
        fields = dict(
            part.partition(": ")[::2] for part in state.information_state_string(player).strip("[]").split("][")
        )
        names = ("fold", "call", "raise")
        rounds = [", ".join(names[int(a)] for a in fields.get(f"Round{i}", "").split()) or "none" for i in (1, 2)]
        public = fields.get("Public")
        second = f" Round 2: {rounds[1]}." if public else ""
        card = _rank(fields["Private"], state)
        return f"Your card: {card}. Public card: {_rank(public, state) if public else 'none'}. Round 1: {rounds[0]}.{second} Pot: {fields['Pot']}."

    def move(self, state: Any, player: int, action: int) -> str:
        return ("fold", "call", "raise")[action]


def _rank(card: str, state: Any) -> str:
    """Cards are numbered rank by rank, two suits each (one number per rank where suits are told as the same)."""
    isomorphic = state.get_game().get_parameters().get("suit_isomorphism", False)
    ranks = "JQKA23456789T"
    return ranks[int(card) if isomorphic else int(card) // 2]


class GridForm(StateForm):
    """Boards as grids under named columns, moves by column."""

    def __init__(self, moves: str = "column") -> None:
        self._moves = moves

    def view(self, state: Any, player: int) -> str:
        rows = state.observation_string(player).rstrip("\n").split("\n")
        header = " ".join(str(i) for i in range(len(rows[0])))
        grid = "\n".join(" ".join(row) for row in rows)
        return f"{header}\n{grid}\nYou are {'xo'[player]}."

    def move(self, state: Any, player: int, action: int) -> str:
        return str(action) if self._moves == "column" else str(state.action_to_string(player, action))


class TicTacToeForm(StateForm):
    """Nine squares numbered 1 to 9."""

    def view(self, state: Any, player: int) -> str:
        cells = [c for row in state.observation_string(player).split("\n") for c in row]
        marks = [str(i + 1) if c == "." else c for i, c in enumerate(cells)]
        grid = "\n".join(" ".join(marks[row : row + 3]) for row in (0, 3, 6))
        return f"{grid}\nYou are {'xo'[player]}."

    def move(self, state: Any, player: int, action: int) -> str:
        return str(action + 1)


FORMS: Mapping[str, StateForm] = {
    "kuhn_poker": KuhnForm(),
    "leduc_poker": LeducForm(),
    "connect_four": GridForm(),
    "tic_tac_toe": TicTacToeForm(),
}
