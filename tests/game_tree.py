"""Exact evaluation of our environments by walking their own game trees: expected values and best responses.

A chance node is one environment instance per deal; below it, moves are made on deep copies. Information sets are what a
seat is shown: its view. Nothing here knows the rules of any game.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence

from selfplay.environment import Environment

Policy = Callable[[str, str, Sequence[str]], Mapping[str, float]]
"""(seat, view, legal moves) → probability of each move."""
Deals = Sequence[tuple[float, Environment]]


def uniform(seat: str, view: str, legal: Sequence[str]) -> Mapping[str, float]:
    return dict.fromkeys(legal, 1 / len(legal))


def always(move: str) -> Policy:
    return lambda seat, view, legal: {m: float(m == move) for m in legal}


def after(game: Environment, seat: str, move: str) -> Environment:
    nxt = copy.deepcopy(game)
    nxt.step({seat: nxt.parse(seat, move)})
    return nxt


def values(deals: Deals, policy: Policy) -> dict[str, float]:
    """Expected reward of each seat when all follow ``policy``."""
    total: dict[str, float] = defaultdict(float)
    for p, game in deals:
        for seat, value in _values(game, policy).items():
            total[seat] += p * value
    return dict(total)


def _values(game: Environment, policy: Policy) -> dict[str, float]:
    movers = tuple(game.to_move())
    if not movers:
        return dict(game.outcome().rewards)
    (seat,) = movers
    out: dict[str, float] = defaultdict(float)
    for move, p in policy(seat, game.view(seat), game.legal_moves(seat) or ()).items():
        if p:
            for s, v in _values(after(game, seat, move), policy).items():
                out[s] += p * v
    return dict(out)


def best_response_value(deals: Deals, policy: Policy, hero: str) -> float:
    """The most ``hero`` can get against the others' ``policy``; information sets from the deepest up."""
    nodes: dict[int, dict[str, list[tuple[float, Environment]]]] = defaultdict(lambda: defaultdict(list))

    def collect(game: Environment, reach: float, depth: int) -> None:
        movers = tuple(game.to_move())
        if not movers or not reach:
            return
        (seat,) = movers
        legal = game.legal_moves(seat) or ()
        if seat == hero:
            nodes[depth][game.view(hero)].append((reach, game))
            for move in legal:
                collect(after(game, seat, move), reach, depth + 1)
        else:
            for move, p in policy(seat, game.view(seat), legal).items():
                collect(after(game, seat, move), reach * p, depth + 1)

    for p, game in deals:
        collect(game, p, 0)
    chosen: dict[str, str] = {}

    def response(seat: str, view: str, legal: Sequence[str]) -> Mapping[str, float]:
        return {chosen[view]: 1.0} if seat == hero else policy(seat, view, legal)

    for depth in sorted(nodes, reverse=True):
        for view, members in nodes[depth].items():
            legal = members[0][1].legal_moves(hero) or ()

            def worth(move: str, members: Sequence[tuple[float, Environment]] = members) -> float:
                return sum(reach * _values(after(g, hero, move), response)[hero] for reach, g in members)

            chosen[view] = max(legal, key=worth)
    return sum(p * _values(game, response)[hero] for p, game in deals)


def nash_conv(deals: Deals, policy: Policy) -> float:
    """Sum over seats of what a best response gains."""
    now = values(deals, policy)
    return sum(best_response_value(deals, policy, seat) - now[seat] for seat in deals[0][1].seats)
