"""Whether the same seed and moves give the same game: again, beside another game, in other processes, and from a copy."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from typing import IO, Any

from selfplay.check.driver import Make, OneByOne, RandomGame, first_difference
from selfplay.check.report import Check, Faults
from selfplay.errors import EnvironmentFault
from selfplay.types import Scalar

NUM_REPEATED, NUM_ABROAD, NUM_COPIED = 12, 4, 6
"""Games per check at most; fewer where one game takes long."""
CHILD_TIMEOUT_S = 30.0


def same_again(make: Make, num: int, faults: Faults) -> Check:
    """Two games of one seed, one after the other."""
    for number in range(num):
        _compare(faults, number, make(number).to_end(), make(number).to_end(), "played again, the same seed differs")
    return faults.result("seed", f"{num} games replayed alike")


def interleaved(make: Make, num: int, faults: Faults) -> Check:
    """Two games round by round in turn, against the same games apart."""
    if not make(0).environment.concurrent:
        return Check(
            name="interleaved", status="note", text="not checked: the game declares that it is played one at a time"
        )
    for number in range(0, num, 2):
        apart = make(number).to_end(), make(number + 1).to_end()
        together = make(number), make(number + 1)
        going = list(together)
        while going:
            going = [g for g in going if g.go_on()]
        for alone, beside in zip(apart, together, strict=True):
            _compare(faults, alone.number, alone, beside, "beside another game of the process it differs")
    return faults.result("interleaved", f"{(num + 1) // 2} pairs of games do not touch each other")


def other_processes(
    env_id: str, params: Mapping[str, Scalar], make: Make, num: int, max_rounds: int, faults: Faults
) -> Check:
    """The same games in two fresh processes with other hash seeds."""
    num = min(num, NUM_ABROAD)
    here = [make(number).to_end() for number in range(num)]
    for hash_seed in (1, 2):
        there = _digests_of_child(env_id, params, num, max_rounds, hash_seed)
        if isinstance(there, str):
            faults.add(f"a fresh process could not play: {there}")
            break
        for game, digests in zip(here, there, strict=True):
            mine = game.digests()
            if mine != digests:
                at = next(
                    (i for i, (a, b) in enumerate(zip(mine, digests, strict=False)) if a != b),
                    min(len(mine), len(digests)),
                )
                line = game.lines[at] if at < len(game.lines) else "the end"
                faults.add(
                    f"with PYTHONHASHSEED={hash_seed} it differs at: {line[:200]}", seed=game.number, turn=_turn(line)
                )
    return faults.result("processes", f"{num} games alike in 2 processes of other hash seeds")


def global_random(make: Make, num: int, faults: Faults) -> Check:
    """Whether the module-level generators are drawn from or seeded."""
    used = []
    for number in range(num):
        before = _numpy_state()
        game = make(number)
        turn: int | None = None
        while game.go_on():
            if turn is None and game.random_was_used:
                turn = game.num_turns
        touched = game.random_was_used
        if touched or (before is not None and _numpy_state() != before):
            used.append((number, turn, "random" if touched else "numpy.random"))
    if used and make(0).environment.global_random:
        return Check(
            name="global-random", status="note", text="draws from the module-level generator, as declared: contained"
        )
    for number, turn, module in used:
        faults.add(
            f"draws from or seeds the module {module}: use self.rng, or declare global_random = True",
            seed=number, turn=turn,
        )  # fmt: skip
    return faults.result("global-random", "module-level generators are left alone")


def copies(make: Make, num: int, faults: Faults) -> Check:
    """A deep copy in mid-game goes the same way, and does not touch the original."""
    num_copied = 0
    for number in range(min(num, NUM_COPIED)):
        game = make(number)
        if game.environment.global_random or not game.environment.concurrent:
            why = "draws from module-level generators" if game.environment.global_random else "is played one at a time"
            return Check(name="copy", status="note", text=f"not checked: the game {why}")
        while len(game.lines) < 4 + 2 * number and game.go_on():
            pass
        if game.ended:
            continue
        try:
            twin = game.copy()
        except EnvironmentFault as e:
            last = e.traceback.strip().splitlines()[-1]
            return Check(name="copy", status="note", text=f"cannot be copied, so not evaluated exactly: {last[:200]}")
        seen = len(game.lines)
        twin.to_end()
        if len(game.lines) == seen:
            _compare(faults, number, game.to_end(), twin, "a deep copy in mid-game goes another way")
        num_copied += 1
    if not num_copied and not faults.num:
        return Check(name="copy", status="ok", text="every game was over before it could be copied")
    return faults.result("copy", f"{num_copied} copies in mid-game played on alike")


def _compare(faults: Faults, number: int, a: RandomGame, b: RandomGame, what: str) -> None:
    if found := first_difference(a, b):
        _, left, right = found
        faults.add(f"{what}: {left[:150]} / {right[:150]}", seed=number, turn=_turn(left))


def _turn(line: str) -> int | None:
    head = line.partition(" ")[0]
    return int(head) if head.isdigit() else None


def _numpy_state() -> str | None:
    numpy: Any = sys.modules.get("numpy")
    return None if numpy is None else repr(numpy.random.get_state(legacy=False))


def _digests_of_child(
    env_id: str, params: Mapping[str, Scalar], num: int, max_rounds: int, hash_seed: int
) -> list[list[str]] | str:
    """Digests of the first games from a fresh process, or what went wrong there."""
    from selfplay.registry.describe import scrubbed_environ

    request = json.dumps({"env": env_id, "params": dict(params), "num": num, "max_rounds": max_rounds})
    environ = {**scrubbed_environ(), "PYTHONHASHSEED": str(hash_seed)}
    command = [sys.executable, "-m", "selfplay.check.determinism", request]
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        child = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=out, stderr=err, env=environ, start_new_session=True
        )
        try:
            child.wait(CHILD_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            return f"it did not end within {CHILD_TIMEOUT_S:g} s"
        finally:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(child.pid, signal.SIGKILL)  # with whatever the environment started
            child.wait()
        answer, told = (_whole(f).splitlines() for f in (out, err))
    try:
        digests: list[list[str]] = json.loads(answer[-1])
    except (IndexError, ValueError):
        return told[-1] if told else "no answer"
    return digests


def _whole(file: IO[bytes]) -> str:
    file.seek(0)
    return file.read().decode("utf-8", "replace").strip()


def main(argument: str) -> None:
    """Entry of the fresh process: digests of the first games as one JSON line, the last of its output."""
    request = json.loads(argument)
    try:
        make, most = OneByOne(request["env"], request["params"]), request["max_rounds"]
        print("\n" + json.dumps([make(n, most).to_end().digests() for n in range(request["num"])]), flush=True)
    except EnvironmentFault as e:
        sys.exit(str(e))
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1])
