"""Which games of other libraries pass ``selfplay env check``: a table, one row per game, and the counts.

In: every game of PettingZoo classic, OpenSpiel and TextArena (one per family), and environments written for verifiers, also
beside the library's own rollouts. Out: rows with 1 (passes) or 0, the reference column saying what was found. A full run
checks some two hundred games and takes about half an hour.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator

from selfplay.bench import verifiers_compat
from selfplay.bench.report import Row
from selfplay.check import check_environment
from selfplay.errors import MissingExtraError, UserError
from selfplay.registry.adapters import load_adapter

SCHEMES = ("pettingzoo", "openspiel", "textarena")
QUICK = ("pettingzoo:tictactoe_v3", "openspiel:kuhn_poker", "textarena:Nim-v0")
CLASSIC = (
    "tictactoe_v3", "connect_four_v3", "rps_v2", "chess_v6", "go_v5", "leduc_holdem_v4", "texas_holdem_v4",
    "texas_holdem_no_limit_v6", "hanabi_v5",
)  # fmt: skip
NUM_GAMES = 10


def run(quick: bool = False) -> list[Row]:
    """A row per library with how many games pass, then a row per game."""
    rows: list[Row] = []
    for env_id in QUICK if quick else _games():
        passed, found = _checked(env_id)
        print(f"{'pass' if passed else 'FAIL'}  {env_id}  {found}", file=sys.stderr, flush=True)
        rows.append(Row(name=env_id, value=float(passed), unit="passes", reference=found))
    rows += verifiers_compat.run(3 if quick else NUM_GAMES)
    totals = []
    for scheme in (*SCHEMES, "verifiers"):
        mine = [r.value for r in rows if r.name.partition(":")[0] == scheme]
        totals.append(Row(name=f"{scheme}_passing", value=sum(mine), unit="games", reference=f"of {len(mine)} checked"))
    return [*totals, *rows]


def _games() -> Iterator[str]:
    yield from (f"pettingzoo:{name}" for name in CLASSIC)
    yield from (f"openspiel:{name}" for name in load_adapter("openspiel").names())
    seen: set[str] = set()
    for name in load_adapter("textarena").names():
        family = name.partition("-v")[0]
        if family not in seen:
            seen.add(family)
            yield f"textarena:{name}"


def _checked(env_id: str) -> tuple[bool, str]:
    try:
        report = check_environment(env_id, num_games=NUM_GAMES, limit_s=120.0)
    except MissingExtraError:
        raise
    except UserError as e:
        return False, f"cannot be had: {e}"
    return not report.faults, "; ".join(f"{c.name}: {c.text[:120]}" for c in report.faults)
