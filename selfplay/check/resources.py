"""What an environment costs and what it leaves behind: time, memory, output, threads, files, processes."""

from __future__ import annotations

import gc
import os
import statistics
import threading
from collections.abc import Sequence
from pathlib import Path

from selfplay.check.driver import Make, RandomGame
from selfplay.check.report import Check, Faults
from selfplay.errors import EnvironmentFault

LEAK_BYTES = 48 << 20
"""Growth of the process over the random games, after the first quarter of them, that counts as a leak."""
STOP_AT_BYTES = 512 << 20


def memory_bytes() -> int:
    """Resident memory of this process; 0 where the system does not tell."""
    try:
        return int(Path("/proc/self/statm").read_text("ascii").split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0


def cost(round_times_s: Sequence[float], memory: Sequence[int], num_turns: int, faults: Faults) -> Check:
    """Time per decision and memory per game. ``memory``: the process after each game."""
    settled = memory[len(memory) // 4 :]
    growth = settled[-1] - settled[0] if len(settled) > 3 else 0
    if growth > LEAK_BYTES:
        per_game = growth / (len(settled) - 1)
        faults.add(f"memory grows by {per_game / 1e6:.2f} MB per game ({growth >> 20} MiB in {len(settled)} games)")
    middle, worst = statistics.median(round_times_s), max(round_times_s)
    per_turn = sum(round_times_s) / max(1, num_turns)
    return faults.result(
        "cost",
        f"{per_turn * 1e6:.0f} us per turn (median round {middle * 1e6:.0f} us, slowest {worst * 1e3:.1f} ms), "
        f"memory {growth / 1e6 / max(1, len(settled)):+.3f} MB per game",
    )


def closing(make: Make, faults: Faults) -> Check:
    """`close` works before the first move, in mid-game, after the end, and twice."""
    for number, rounds in enumerate((0, 1, 3, 1_000_000)):
        game = make(number)
        try:
            for _ in range(rounds):
                if not game.go_on():
                    break
            game.table.close()
            game.table.close()
        except EnvironmentFault as e:
            faults.add(f"close() after {game.num_turns} turns: {e}", seed=number, turn=e.turn)
    return faults.result("close", "works before, during and after a game, and twice")


class Leftovers:
    """Threads, files and child processes, now and later."""

    def __init__(self) -> None:
        self._before = _held()

    def check(self, faults: Faults) -> Check:
        """What is there that was not there when this object was made."""
        gc.collect()
        for what, now in _held().items():
            if more := sorted(now - self._before[what]):
                faults.add(f"games leave {len(more)} {what} behind: {', '.join(more[:3])[:200]}")
        return faults.result("leftovers", "no thread, file or process is left behind")


def _held() -> dict[str, set[str]]:
    return {
        "threads": {f"{t.name} {t.ident}" for t in threading.enumerate()},
        "open files": _open_files(),
        "child processes": _children(),
    }


def _open_files() -> set[str]:
    folder, found = Path("/proc/self/fd"), set()
    for link in list(folder.iterdir()) if folder.is_dir() else ():
        try:
            found.add(f"{link.name} {link.readlink()}")
        except OSError:  # the descriptor that listed the folder
            continue
    return found


def _children() -> set[str]:
    """Ids of living processes whose parent is this one, or which are in the process group that it leads.

    The group shows grandchildren whose parent has gone; where another process leads it, its members are not of our making.
    """
    found: set[str] = set()
    mine = os.getpid()
    group = mine if os.getpgrp() == mine else None
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text("utf-8", "replace").rpartition(")")[2].split()
        except OSError:
            continue
        if path.parent.name != str(mine) and (int(fields[1]) == mine or int(fields[2]) == group):
            found.add(path.parent.name)
    return found


def output(games: Sequence[RandomGame], raw_bytes: int, raw_start: str, faults: Faults) -> Check:
    """Nothing is written to standard output: results of commands go there. ``raw_bytes``: written past `sys.stdout`."""
    for game in games:
        if printed := game.table.num_printed_chars:
            faults.add(f"prints {printed} characters to standard output", seed=game.number)
    if raw_bytes:
        faults.add(f"writes {raw_bytes} bytes straight to the descriptor of standard output: {raw_start!r}")
    return faults.result("output", "standard output is left alone")
