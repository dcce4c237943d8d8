"""``selfplay bench rollout``: generation by the policy server against the bare engine under it.

    rollout_vs_raw_vllm      tokens per second: server over ZeroMQ, chats in and answers out, against AsyncLLM called directly
                             with ready token ids; both with the corrected adapter kernel
    adapter_kernel_vs_stock  the bare engine with the corrected CPU adapter kernel against vLLM's own
    adapters_vs_base_only    the bare engine answering with adapters against the same engine without any: what adapters cost,
                             and so how far the row before could rise at most

All do the same work: greedy answers to the same chats, a third by the base model and a third by each of two adapters,
with the same number in flight. The three engines are up at once and take turns, so that whatever else the machine does
hits all of them alike; each works alone in its turn.
"""

from __future__ import annotations

import asyncio
import os
import statistics
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import msgspec
import zmq

from selfplay.agent import Message, Sampling
from selfplay.bench.report import Row
from selfplay.bench.rollout_raw import ADAPTERS, RawConfig, RawWork, WorkDone, who_answers
from selfplay.errors import RunError
from selfplay.models import ResolvedModel, resolve_model
from selfplay.models.machine import auto_dtype
from selfplay.policy import PolicyServerConfig
from selfplay.process import Child, RuntimeDir, spawn
from selfplay.types import PolicyVersion
from selfplay.wire.codec import Codec
from selfplay.wire.messages import (
    PROTOCOL,
    BeginInstall,
    BucketHeader,
    CommitInstall,
    FromPolicy,
    Generate,
    Generated,
    MakeCurrent,
    PolicyHello,
    Refused,
    ToPolicy,
)
from selfplay.wire.sockets import Caller, connect_dealer, unique_identity

MODEL, QUICK_MODEL = "smollm2-135m", "tiny"
RANK = 8
SLOTS = 6
"""As a training run of two agents has by default; two are in use."""
START_S, TURN_S = 600.0, 900.0
SCENE = (
    "You argue for your side in a short debate, round {round}. Be brief and concrete, answer what the other side said, "
    "and end with the one point that the jury should remember."
)


class Size(msgspec.Struct, frozen=True, kw_only=True):
    """How much is measured."""

    model: str
    requests: int
    """Answers in one turn of one engine."""
    concurrency: int
    max_tokens: int
    repeats: int


FULL = Size(model=MODEL, requests=64, concurrency=64, max_tokens=24, repeats=3)
QUICK = Size(model=QUICK_MODEL, requests=96, concurrency=32, max_tokens=24, repeats=1)


def run(quick: bool) -> list[Row]:
    """The rows named above; ``quick`` uses the tiny model once."""
    return asyncio.run(_measure(QUICK if quick else FULL))


async def _measure(size: Size) -> list[Row]:
    model, runtime = resolve_model(size.model), RuntimeDir.create()
    try:
        config = _server_config(model, runtime, size)
        headers = _make_adapters(config, runtime)
        with _raw(config, headers, correct=True) as raw, _raw(config, headers, correct=False) as stock:
            async with _serving(config, headers, runtime) as caller:
                return await _take_turns(size, config, caller, raw, stock)
    finally:
        runtime.remove()


async def _take_turns(
    size: Size, config: PolicyServerConfig, caller: Caller, raw: RawEngine, stock: RawEngine
) -> list[Row]:
    render = _renderer(config.model)
    speeds: dict[str, list[float]] = {"served": [], "raw": [], "stock": [], "base": []}
    for number in range(size.repeats + 1):
        # The first turn warms up: a quarter of the work, not counted.
        count = size.requests if number else size.requests // 4
        chats, others = ([_chat(f"{number}{side}", i) for i in range(count)] for side in ("", "b"))
        work = RawWork(prompts=[render(c) for c in chats], concurrency=size.concurrency, max_tokens=size.max_tokens)
        alone = msgspec.structs.replace(work, prompts=[render(c) for c in others], adapters=False)
        turn = {
            "served": await _ask_all(caller, chats, size),
            "raw": await asyncio.to_thread(raw.do, work),
            "base": await asyncio.to_thread(raw.do, alone),
            "stock": await asyncio.to_thread(stock.do, work),
        }
        if number:
            for name, done in turn.items():
                speeds[name].append(done.num_tokens / done.seconds)
    return _rows(speeds, size)


def _rows(speeds: dict[str, list[float]], size: Size) -> list[Row]:
    def row(name: str, ours: str, reference: str, what: str) -> Row:
        ratios = [a / b for a, b in zip(speeds[ours], speeds[reference], strict=True)]
        return Row(
            name=name, value=statistics.median(speeds[ours]), unit="tok/s", reference=what,
            ratio=statistics.median(ratios), repeats=size.repeats,
        )  # fmt: skip

    where = f"{size.concurrency} in flight, base and two adapters"
    return [
        row("rollout_vs_raw_vllm", "served", "raw", f"AsyncLLM called directly ({where})"),
        row("adapter_kernel_vs_stock", "raw", "stock", f"vLLM's own CPU adapter kernel ({where})"),
        row(
            "adapters_vs_base_only", "raw", "base", f"the same engine, base model alone ({size.concurrency} in flight)"
        ),
    ]


# ── the same chats for all ────────────────────────────────────────────────────────────────────────


def _chat(turn: str, number: int) -> tuple[Message, ...]:
    """Chats differ from their first words on, so no turn lives on the prefix cache of the one before."""
    return (
        Message("system", SCENE.format(round=f"{turn}.{number}")),
        Message("user", f"The other side said: it would cost {number + 3} times as much as we have. Your answer?"),
    )


def _renderer(model: str) -> Any:
    from selfplay.policy.chat import HfChat
    from selfplay.policy.rendering import Renderer

    renderer = Renderer(HfChat(model))
    return lambda chat: list(renderer.render(chat, 0, ()).ids)


def _server_config(model: ResolvedModel, runtime: RuntimeDir, size: Size) -> PolicyServerConfig:
    return PolicyServerConfig(
        address=runtime.endpoint("policy"), runtime_dir=str(runtime.path), model=str(model.path), engine="vllm",
        dtype=auto_dtype(model.default_dtype), max_model_len=min(512, model.max_position_embeddings),
        max_live_adapters=SLOTS, max_rank=RANK, max_num_seqs=size.concurrency, kv_cache_mb=512,
        targets=model.linear_names, threads=max(1, (os.cpu_count() or 1) // 2),
    )  # fmt: skip


def _make_adapters(config: PolicyServerConfig, runtime: RuntimeDir) -> dict[str, BucketHeader]:
    """Random adapters, left in the runtime folder for every engine to read."""
    import torch

    from selfplay.policy.adapter_check import rules_of
    from selfplay.sync import make_sender, pack

    headers = {}
    rules = rules_of(config.model, config.targets, RANK)
    settings: dict[str, Any] = {"r": RANK, "lora_alpha": 2.0 * RANK, "target_modules": list(config.targets)}
    for seed, name in enumerate(ADAPTERS):
        generator = torch.Generator().manual_seed(seed)
        tensors = {}
        for module, shape in rules.shapes.items():
            if module.rpartition(".")[2] in rules.targets:
                at = f"base_model.model.{module}"
                tensors[f"{at}.lora_A.weight"] = torch.randn(RANK, shape[1], generator=generator) * 0.02
                tensors[f"{at}.lora_B.weight"] = torch.randn(shape[0], RANK, generator=generator) * 0.02
        bucket = pack(
            tensors,
            dtype="float32",
            transport="shm",
            address=str(runtime.file(f"{name}.bucket")),
            adapter_config=settings,
        )
        # The sender is not closed: what it left is for three receivers, and goes with the runtime folder.
        make_sender("shm", address="", world_size=2, timeout_s=10).send(bucket, 10)
        headers[name] = bucket.header
    return headers


# ── our server ────────────────────────────────────────────────────────────────────────────────────


@asynccontextmanager
async def _serving(
    config: PolicyServerConfig, headers: dict[str, BucketHeader], runtime: RuntimeDir
) -> AsyncIterator[Caller]:
    child = spawn("policy", "selfplay.policy.server", _json(config), log=runtime.file("policy.log"))
    context: zmq.Context[Any] = zmq.Context()
    caller = Caller(
        connect_dealer(context, config.address, unique_identity("bench")),
        Codec(ToPolicy),
        Codec(FromPolicy),
        "the server",
    )
    try:
        await _ready(caller, child)
        for name, header in headers.items():
            version = PolicyVersion(name, 0)
            await _call(caller, BeginInstall, version=version, header=header)
            await _call(caller, CommitInstall, version=version, timeout_s=30.0)
            await _call(caller, MakeCurrent, version=version)
        yield caller
    finally:
        await caller.close()
        context.term()
        await asyncio.to_thread(child.stop, 10.0)


async def _ready(caller: Caller, child: Child) -> None:
    hello = asyncio.create_task(
        caller.call(lambda request: PolicyHello(request=request, protocol=PROTOCOL), timeout_s=START_S)
    )
    while not hello.done():
        await asyncio.sleep(0.1)
        if child.exit_code() is not None:
            hello.cancel()
            raise RunError(child.describe_exit())
    await hello


async def _call(caller: Caller, kind: type[Any], **fields: Any) -> Any:
    reply = await caller.call(lambda request: kind(request=request, **fields), timeout_s=TURN_S)
    if isinstance(reply, Refused):
        raise RunError(f"the policy server refused: {reply.message}")
    return reply


async def _ask_all(caller: Caller, chats: list[tuple[Message, ...]], size: Size) -> WorkDone:
    """All chats answered, ``concurrency`` at a time."""
    open_slots = asyncio.Semaphore(size.concurrency)
    sampling = Sampling(temperature=0.0, max_tokens=size.max_tokens)

    async def ask(number: int) -> int:
        async with open_slots:
            reply: Generated = await _call(
                caller, Generate, episode_id=f"{number}.0", agent=who_answers(number) or "base", pin="turn",
                messages=chats[number], known_messages=0, prefix_ids=(), sampling=sampling, timeout_s=TURN_S,
            )  # fmt: skip
            return len(reply.answer.sampled_ids)

    start = time.perf_counter()
    counts = await asyncio.gather(*(ask(i) for i in range(len(chats))))
    return WorkDone(num_tokens=sum(counts), seconds=time.perf_counter() - start)


# ── the bare engine ───────────────────────────────────────────────────────────────────────────────


class RawEngine:
    """A child process with nothing but the engine; work goes in as JSON lines, results come out likewise."""

    def __init__(self, process: subprocess.Popen[bytes], results: Any, log: Path) -> None:
        self._process, self._results, self._log = process, results, log

    def do(self, work: RawWork) -> WorkDone:
        """Have the work done; blocks."""
        assert self._process.stdin is not None  # opened as a pipe below
        self._process.stdin.write(msgspec.json.encode(work) + b"\n")
        self._process.stdin.flush()
        return self.result()

    def result(self) -> WorkDone:
        """The next result; raises `RunError` with the log's end when the process is gone."""
        line = self._results.readline()
        if not line:
            raise RunError(f"the bare engine ended: {self._log.read_text('utf-8', 'replace')[-2000:]}")
        return msgspec.json.decode(line, type=WorkDone)


@contextmanager
def _raw(config: PolicyServerConfig, headers: dict[str, BucketHeader], *, correct: bool) -> Iterator[RawEngine]:
    log = Path(config.runtime_dir) / f"raw-{correct}.log"
    read, write = os.pipe()
    raw = RawConfig(server=config, headers=headers, correct_kernel=correct, results_fd=write)
    with log.open("wb") as out, os.fdopen(read, "rb") as results:
        process = subprocess.Popen(
            [sys.executable, "-m", "selfplay.bench.rollout_raw", _json(raw)],
            stdin=subprocess.PIPE, stdout=out, stderr=out, pass_fds=(write,), start_new_session=True,
        )  # fmt: skip
        os.close(write)
        child = Child("raw engine", process, log)
        try:
            engine = RawEngine(process, results, log)
            engine.result()
            yield engine
        finally:
            child.stop(10.0)


def _json(value: msgspec.Struct) -> str:
    return msgspec.json.encode(value).decode()
