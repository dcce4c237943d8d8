"""What the pool tests play: a game with faults on demand and players of its own, installed as a small distribution."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.patience import PATIENCE_S

from selfplay.agent import Sampling
from selfplay.pool import EpisodeResult, FailedResult, PoolConfig, PoolSupervisor
from selfplay.process import RuntimeDir
from selfplay.types import Limits, Match, SeatAssignment, derive_seed

GAME = "pool-test-v0"
_MODULE = '''
"""A talk of two seats, with faults on demand."""
import os, signal, sys, time
from selfplay.agent import Answer, Message
from selfplay.environment import Environment, Outcome

class Talk(Environment):
    seats = ("a", "b")

    def __init__(self, rng, fault="", at=0, turns=4, busy_s=0.0):
        super().__init__(rng)
        self.fault, self.at, self.turns, self.busy_s = fault, at, turns, busy_s
        self.said = []
        if fault == "exit at reset":
            os._exit(139)

    def rules(self, seat):
        return "Talk."

    def to_move(self):
        return () if len(self.said) >= self.turns else (self.seats[len(self.said) % 2],)

    def view(self, seat):
        return f"{self.rng.random():.6f} after {len(self.said)}"

    def step(self, moves):
        self.said += moves.values()
        if len(self.said) == self.at:
            self.fail()

    def fail(self):
        if self.fault == "raise":
            raise ValueError("bad card 53")
        if self.fault == "exit at step":
            os._exit(139)
        if self.fault == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if self.fault == "sys.exit":
            sys.exit(3)
        if self.fault == "input":
            input()
        if self.fault == "busy":
            end = time.monotonic() + self.busy_s
            while time.monotonic() < end:
                pass
        if self.fault == "sleep":
            time.sleep(3600)

    def outcome(self):
        reward = 1.0 if sum(map(len, self.said)) % 2 else -1.0
        info = {"number": 2**70} if self.fault == "big number" else {"text": "x" * (65 << 20)} if self.fault == "big text" else {}
        return Outcome(
            rewards={"a": reward, "b": -reward}, winners=("a",) if reward > 0 else ("b",), reason="said", info=info)

class Stuck(Talk):
    """Stuck where a task of the play loop is not the episode's first one: in the answer to simultaneous moves."""
    def to_move(self):
        return () if self.said else self.seats

    def parse(self, seat, text):
        time.sleep(3600)

class Talker:
    def __init__(self, context):
        self.context, self.chat = context, []

    async def decide(self, decision):
        self.chat.append(Message("user", decision.view))
        c = self.context
        answer = await c.policy.generate(
            c.assignment, episode_id=c.episode_id, messages=self.chat, known_messages=0, prefix_ids=(), sampling=c.sampling)
        self.chat.append(Message("assistant", answer.text))
        return answer

    async def close(self):
        pass

class Mute(Talker):
    async def decide(self, decision):
        return Answer(text=f"{self.context.rng.random():.6f}")

class Deaf(Talker):
    """Does not let itself be cancelled."""
    async def decide(self, decision):
        import asyncio
        while True:
            try:
                await asyncio.sleep(3600)
            except asyncio.CancelledError:
                pass
'''
_ENTRY_POINTS = """
[selfplay.environments]
pool-test-v0 = pool_test_games:Talk
pool-test-stuck-v0 = pool_test_games:Stuck
pool-test-import-v0 = pool_test_import:Talk
[selfplay.agents]
talker = pool_test_games:Talker
mute = pool_test_games:Mute
deaf = pool_test_games:Deaf
"""


def install(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the games known to worker processes started from now on."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "pool_test_games.py").write_text(_MODULE)
    (folder / "pool_test_import.py").write_text("import os\nos._exit(139)\n")
    info = folder / "pool_test_games-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: pool-test-games\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(_ENTRY_POINTS)
    root = Path(__file__).resolve().parent.parent
    paths = [folder, root, root / "environments", root / "agents"]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(map(str, paths)))


def make_match(
    index: int,
    *,
    player: str = "mute",
    env: str = GAME,
    time_s: float = 60.0,
    attempt: int = 0,
    pin: Any = "turn",
    **params: Any,
) -> Match:
    """Match ``index`` of the pool tests."""
    seats = tuple(SeatAssignment(seat=s, player=player, agent=f"agent-{s}", pin=pin) for s in ("a", "b"))
    return Match(
        index=index, env=env, env_params=params, seed=derive_seed("pool tests", index), seats=seats,
        limits=Limits(time_s=time_s), attempt=attempt,
    )  # fmt: skip


def make_config(**changes: Any) -> PoolConfig:
    """A pool with one restart-free worker and short limits."""
    defaults: dict[str, Any] = {
        "workers": 1, "concurrency": 16, "max_restarts": 0, "episode_timeout_s": 30.0, "request_timeout_s": 30.0,
        "grace_s": 5.0, "sampling": Sampling(max_tokens=8),
    }  # fmt: skip
    return PoolConfig(**(defaults | changes))


@contextlib.asynccontextmanager
async def running_pool(config: PoolConfig, runtime: RuntimeDir, log_dir: Path) -> AsyncIterator[PoolSupervisor]:
    """A started pool, closed at the end of the block."""
    pool = PoolSupervisor(config, runtime=runtime, log_dir=log_dir, say=print)
    try:
        await pool.start()
        yield pool
    finally:
        await pool.close(grace_s=5.0)


async def play_all(
    pool: PoolSupervisor, matches: list[Match], *, replay: bool = True
) -> tuple[dict[int, EpisodeResult], list[FailedResult]]:
    """Episodes by match index, and all failures; void attempts are played again when ``replay``."""
    pending, done, failures = list(matches), dict[int, EpisodeResult](), list[FailedResult]()
    num_out = 0
    while pending or num_out:
        while pending and pool.num_free:
            await pool.submit(pending.pop(0))
            num_out += 1
        if not num_out:
            await pool.submit(pending.pop(0))
            num_out += 1
        result = await asyncio.wait_for(pool.next_result(), PATIENCE_S)
        num_out -= 1
        await pool.ack(result.match.episode_id)
        if isinstance(result, EpisodeResult):
            assert result.match.index not in done
            done[result.match.index] = result
            continue
        failures.append(result)
        if replay and result.kind == "infrastructure":
            pending.append(msgspec.structs.replace(result.match, attempt=result.match.attempt + 1))
    return done, failures
