"""What an environment pool costs per turn, beside a plain Python loop that plays the same game with the same answers.

One worker process plays 64 games at once against a policy server that answers at once, in a process of its own; this
process is the controller. Everything that is not the model is in the figure: play loop, player, messages, checks.
"""

from __future__ import annotations

import asyncio
import os
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path

from selfplay.bench.pool_game import Talk
from selfplay.bench.pool_policy import ANSWER
from selfplay.bench.report import Row
from selfplay.errors import RunError
from selfplay.pool import EpisodeResult, PoolConfig, PoolSupervisor
from selfplay.process import RuntimeDir, spawn
from selfplay.types import Match, SeatAssignment, derive_seed

CONCURRENCY, TURNS = 64, 20
GAME = str(Path(__file__).with_name("pool_game.py"))


def run(quick: bool = False) -> list[Row]:
    """Rows ``overhead_us_per_turn``, ``worker_cpu_us_per_turn``, ``episodes_per_s``, ``turns_per_s``."""
    num_games, repeats = (128, 2) if quick else (512, 5)
    runtime = RuntimeDir.create()
    try:
        with tempfile.TemporaryDirectory() as logs:
            measured = asyncio.run(_measure(runtime, Path(logs), num_games, repeats))
    finally:
        runtime.remove()
    plain_us = statistics.median(_plain_us_per_turn(num_games) for _ in range(repeats))
    pool_us = statistics.median(wall for wall, _ in measured)
    turns_per_s = 1e6 / pool_us
    plain = f"plain Python loop, {plain_us:.1f} us per turn"
    return [
        Row(name="overhead_us_per_turn", value=pool_us - plain_us, unit="us", reference=plain, ratio=pool_us / plain_us, repeats=repeats),
        Row(name="worker_cpu_us_per_turn", value=statistics.median(cpu for _, cpu in measured), unit="us", repeats=repeats),
        Row(name="turns_per_s", value=turns_per_s, unit="1/s", reference=plain, ratio=turns_per_s * plain_us / 1e6, repeats=repeats),
        Row(name="episodes_per_s", value=turns_per_s / TURNS, unit="1/s", repeats=repeats),
    ]  # fmt: skip


async def _measure(runtime: RuntimeDir, logs: Path, num_games: int, repeats: int) -> list[tuple[float, float]]:
    """(wall, CPU of the worker) in microseconds per turn, for each repeat after one for warming up."""
    endpoint = runtime.endpoint("policy.sock")
    policy = spawn("policy", "selfplay.bench.pool_policy", endpoint, log=logs / "policy.log")
    config = PoolConfig(workers=1, concurrency=CONCURRENCY, policy_endpoints=(endpoint,))
    pool = PoolSupervisor(config, runtime=runtime, log_dir=logs, say=_say)
    try:
        await pool.start()
        await _play(pool, range(CONCURRENCY))
        return [await _timed(pool, range(1000 * (i + 1), 1000 * (i + 1) + num_games)) for i in range(repeats)]
    finally:
        await pool.close(grace_s=5.0)
        policy.kill()


async def _timed(pool: PoolSupervisor, indices: range) -> tuple[float, float]:
    (pid,) = pool.pids.values()
    cpu, begun = _cpu_s(pid), time.perf_counter()
    await _play(pool, indices)
    num_turns = len(indices) * TURNS
    return (time.perf_counter() - begun) * 1e6 / num_turns, (_cpu_s(pid) - cpu) * 1e6 / num_turns


async def _play(pool: PoolSupervisor, indices: range) -> None:
    """Keep every slot of the pool busy until all matches are played."""
    waiting = [_match(i) for i in reversed(indices)]
    num_left = len(waiting)
    while num_left:
        while waiting and pool.num_free:
            await pool.submit(waiting.pop())
        result = await pool.next_result()
        await pool.ack(result.match.episode_id)
        if not isinstance(result, EpisodeResult):
            raise RunError(f"a game of the benchmark failed: {result.message}")
        num_left -= 1


def _match(index: int) -> Match:
    seats = tuple(SeatAssignment(seat=s, player="llm", agent=s) for s in Talk.seats)
    seed = derive_seed("bench pool", index)
    return Match(index=index, env=GAME, env_params={"turns": TURNS}, seed=seed, seats=seats)


def _plain_us_per_turn(num_games: int) -> float:
    """The reference: the game alone, one after the other, with the same answers."""
    begun = time.perf_counter()
    for index in range(num_games):
        game = Talk(random.Random(derive_seed("bench pool", index)), turns=TURNS)
        while seats := game.to_move():
            moves = {}
            for seat in seats:
                game.rules(seat)
                game.view(seat)
                moves[seat] = game.parse(seat, ANSWER.text)
            game.step(moves)
        game.outcome()
    return (time.perf_counter() - begun) * 1e6 / (num_games * TURNS)


def _cpu_s(pid: int) -> float:
    """User and system time of a process; 0 where the system has no /proc."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
