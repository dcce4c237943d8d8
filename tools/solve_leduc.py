"""Writes the equilibrium table of Leduc poker that the agent kind ``equilibrium`` plays: ``python tools/solve_leduc.py``.

In: OpenSpiel's Leduc poker, solved by its CFR+ (needs the extra ``envs``). Out: ``agents/selfplay_agents/leduc.json``:
for every situation the probability of each legal move. A situation is the own card, the public card or ``-``, and each
round's moves by their first letters (check is ``k``), for example ``QJ kkr``.
"""

from __future__ import annotations

import json
from pathlib import Path

TABLE = Path(__file__).resolve().parent.parent / "agents" / "selfplay_agents" / "leduc.json"
ITERATIONS = 20_000
RANKS = "JQK"
NEGLIGIBLE = 5e-4


def main() -> None:
    """Solve, map to the letters of this game, write."""
    import pyspiel

    game = pyspiel.load_game("leduc_poker", {"suit_isomorphism": True})
    solver = pyspiel.CFRPlusSolver(game)
    for _ in range(ITERATIONS):
        solver.evaluate_and_update_policy()
    table: dict[str, dict[str, float]] = {}
    _walk(game.new_initial_state(), solver.average_policy(), [], "", table)
    lines = [f"{json.dumps(key)}: {json.dumps(table[key])}" for key in sorted(table)]
    TABLE.write_text("{\n" + ",\n".join(lines) + "\n}\n", "utf-8")


def _walk(state, policy, cards, moves, table):  # type: ignore[no-untyped-def]
    """Visit every node below ``state``; ``cards`` are the dealt ranks, ``moves`` both rounds' letters."""
    if state.is_terminal():
        return
    if state.is_chance_node():
        for action, _ in state.chance_outcomes():
            dealt_public = len(cards) == 2
            _walk(state.child(action), policy, [*cards, RANKS[action]], moves + (" " if dealt_public else ""), table)
        return
    letters = {action: _letter(state, action) for action in state.legal_actions()}
    key = f"{cards[state.current_player()]}{cards[2] if len(cards) == 3 else '-'} {moves}".strip()
    if key not in table:
        table[key] = _cleaned({letters[a]: p for a, p in policy.action_probabilities(state).items()})
    for action, letter in letters.items():
        _walk(state.child(action), policy, cards, moves + letter, table)


def _letter(state, action):  # type: ignore[no-untyped-def]
    name = state.action_to_string(state.current_player(), action).lower()
    return {"fold": "f", "raise": "r"}.get(name, "c" if 0 in state.legal_actions() else "k")


def _cleaned(probabilities: dict[str, float]) -> dict[str, float]:
    """Without noise of the solver, in four digits."""
    kept = {move: p if p >= NEGLIGIBLE else 0.0 for move, p in probabilities.items()}
    total = sum(kept.values())
    return {move: round(p / total, 4) for move, p in kept.items()}


if __name__ == "__main__":
    main()
