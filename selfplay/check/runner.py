"""All checks of one environment, in order, in this process.

games with random players ─► inspectors          (rules kept, text, hidden information, endings)
                           ├► rewards, seats     (declared beside seen)
                           └► cost, output
then: seed, interleaved, processes, global-random, copy, forfeit, close, leftovers
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping

import msgspec

from selfplay.check import determinism, resources, results
from selfplay.check.driver import OneByOne, RandomGame
from selfplay.check.inspectors import INSPECTORS, Inspector
from selfplay.check.report import Check, Faults, Report
from selfplay.errors import EnvironmentFault
from selfplay.registry import environment_source, resolve_environment_id
from selfplay.types import Scalar

NUM_GAMES, GAMES_S = 200, 3.0
"""Random games per check: so many, or as many as fit into so many seconds (at least 2)."""
GAME_S = 8.0
"""A game that takes longer is left where it is."""
REPEATED_S = 1.0
"""So much may one game, and all first games, of the checks of determinism take."""


class Played(msgspec.Struct):
    """What is known after the random games."""

    games: list[RandomGame]
    inspectors: list[Inspector]
    times_s: list[float]
    memory: list[int]
    num_turns: int = 0

    def num_repeats(self) -> int:
        """How many games the checks of determinism can afford."""
        game_s = sum(self.times_s) / max(1, len(self.memory))
        return max(1, min(determinism.NUM_REPEATED, int(REPEATED_S / max(game_s, 1e-3))))

    def max_rounds(self) -> int:
        """How many rounds of a game they can afford."""
        round_s = sum(self.times_s) / max(1, len(self.times_s))
        return max(30, int(REPEATED_S / max(round_s, 1e-6)))


def check_here(
    env_id: str,
    params: Mapping[str, Scalar] | None = None,
    *,
    num_games: int = NUM_GAMES,
    begin: Callable[[str], None] = lambda name: None,  # noqa: ARG005
    emit: Callable[[Check], None] = lambda check: None,  # noqa: ARG005
    raw_output: Callable[[], tuple[int, str]] = lambda: (0, ""),
) -> Report:
    """Run every check; ``begin`` hears what starts, ``emit`` each result. Runs the environment's code in this process."""
    resolved, values = resolve_environment_id(env_id), dict(params or {})
    checks: list[Check] = []
    played = Played(games=[], inspectors=[], times_s=[], memory=[])
    for check in _checks(resolved, values, num_games, played, begin, raw_output):
        checks.append(check)
        emit(check)
    return Report(
        env=resolved,
        source=environment_source(resolved),
        params=values,
        num_games=len(played.memory),
        checks=tuple(checks),
    )


def _checks(
    env_id: str,
    params: dict[str, Scalar],
    num_games: int,
    played: Played,
    begin: Callable[[str], None],
    raw_output: Callable[[], tuple[int, str]],
) -> Iterator[Check]:
    make = OneByOne(env_id, params)

    def run(name: str, check: Callable[[Faults], Check]) -> Check:
        begin(name)
        started, faults = time.perf_counter(), Faults(env_id, params)
        try:
            found = check(faults)
        except EnvironmentFault as e:
            faults.add(f"not finished: {e}", turn=e.turn, seat=e.seat)
            found = faults.result(name, "")
        return msgspec.structs.replace(found, time_s=round(time.perf_counter() - started, 3))

    yield run("declared", lambda f: results.declarations(make, f))
    begin("games")
    _warm_up(make)
    leftovers = resources.Leftovers()
    yield run("games", lambda f: _play(make, num_games, env_id, params, played, f))
    for inspector in played.inspectors:
        yield inspector.result()
    if played.games:
        yield run("rewards", lambda f: results.rewards(played.games, f))
    yield results.seat_bias(played.games)
    num, max_rounds = played.num_repeats(), played.max_rounds()

    def make_short(number: int) -> RandomGame:
        return make(number, max_rounds)

    yield run("seed", lambda f: determinism.same_again(make_short, num, f))
    yield run("interleaved", lambda f: determinism.interleaved(make_short, num, f))
    yield run("processes", lambda f: determinism.other_processes(env_id, params, make_short, num, max_rounds, f))
    yield run("global-random", lambda f: determinism.global_random(make_short, num, f))
    yield run("copy", lambda f: determinism.copies(make_short, num, f))
    yield run("forfeit", lambda f: results.forfeits(make, f))
    yield run("close", lambda f: resources.closing(make_short, f))
    if played.times_s:
        yield run("cost", lambda f: resources.cost(played.times_s, played.memory, played.num_turns, f))
    yield run("output", lambda f: resources.output(played.games, *raw_output(), f))
    played.games.clear()
    yield run("leftovers", leftovers.check)


def _warm_up(make: Callable[[int], RandomGame]) -> None:
    """One game whose imports and caches are nobody's leftovers; its faults show in the games that count."""
    try:
        make(0).to_end().table.close()
    except EnvironmentFault:
        return


def _play(
    make: Callable[[int], RandomGame],
    num_games: int,
    env_id: str,
    params: dict[str, Scalar],
    played: Played,
    faults: Faults,
) -> Check:
    """Play random games under the eyes of the inspectors; a game that raises is a finding, and the next is played."""
    played.inspectors = [kind(Faults(env_id, params)) for kind in INSPECTORS]
    until, num_raised, num_done = time.perf_counter() + GAMES_S, 0, 0
    first_memory = resources.memory_bytes()
    for number in range(num_games):
        if number >= 2 and (time.perf_counter() > until or num_raised > 10):
            break
        try:
            game = make(number)
            _play_one(game, played)
        except EnvironmentFault as e:
            num_raised += 1
            last = e.traceback.strip().splitlines()[-1]
            faults.add(f"raises {last}{_where(e.traceback)}", seed=number, turn=e.turn, seat=e.seat)
            continue
        finally:
            num_done += 1
        played.memory.append(resources.memory_bytes())
        if played.memory[-1] - first_memory > resources.STOP_AT_BYTES:
            break
    return faults.result("games", f"{num_done} random games, {played.num_turns} turns, none raised")


def _play_one(game: RandomGame, played: Played) -> None:
    begun = time.perf_counter()
    over = begun + GAME_S
    try:
        while True:
            started = time.perf_counter()
            decisions = game.open()
            if not decisions or started > over:
                break
            opened_s = time.perf_counter() - started
            for inspector in played.inspectors:
                inspector.decisions(game, decisions)
            before, started = game.num_turns, time.perf_counter()
            going = game.play_round()
            played.times_s.append(opened_s + time.perf_counter() - started)
            played.num_turns += game.num_turns - before
            if not going:
                break
        for inspector in played.inspectors:
            inspector.ended(game)
    finally:
        game.table.close()
    game.lines.clear()
    played.games.append(game)


def _where(trace: str) -> str:
    """The innermost place of a traceback, as `` at FILE:LINE``."""
    files = [line.strip() for line in trace.splitlines() if line.strip().startswith('File "')]
    if not files:
        return ""
    path, _, rest = files[-1].removeprefix('File "').partition('", line ')
    return f" at {path.rpartition('/')[2]}:{rest.partition(',')[0]}"
