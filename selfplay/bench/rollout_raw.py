"""``python -m selfplay.bench.rollout_raw JSON``: AsyncLLM and nothing around it, the reference of ``bench rollout``.

In: lines of JSON with ready token ids on standard input. Out: one line per piece of work on the given descriptor, the
first as soon as the engine is up. Ends when its input does.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from typing import TYPE_CHECKING

import msgspec

from selfplay.policy import PolicyServerConfig, environ
from selfplay.wire.messages import BucketHeader

if TYPE_CHECKING:
    from selfplay.policy.vllm_engine import VllmEngine

ADAPTERS = ("one", "two")


class RawConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The engine's settings, its adapters, and whether the corrected kernel is applied."""

    server: PolicyServerConfig
    headers: dict[str, BucketHeader]
    correct_kernel: bool
    results_fd: int


class RawWork(msgspec.Struct, frozen=True, kw_only=True):
    """Prompts to answer, ``concurrency`` at a time."""

    prompts: list[list[int]]
    concurrency: int
    max_tokens: int
    adapters: bool = True
    """Two of three answers by an adapter; else all by the base model."""


class WorkDone(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens sampled, and how long it took."""

    num_tokens: int
    seconds: float


def who_answers(number: int) -> str | None:
    """The adapter of request ``number``: base, one, two in turn."""
    return (None, *ADAPTERS)[number % (1 + len(ADAPTERS))]


async def serve(config: RawConfig) -> None:
    """Work until the input ends."""
    from selfplay.policy.chat import HfChat
    from selfplay.policy.vllm_engine import VllmEngine

    engine = VllmEngine(config.server, correct_kernel=config.correct_kernel)
    await engine.start()
    try:
        for name, header in config.headers.items():
            await engine.begin_install(name, header)
            await engine.commit_install(name, 60.0)
        stop_ids = HfChat(config.server.model).stop_ids
        _tell(config, WorkDone(num_tokens=0, seconds=0.0))
        while line := await asyncio.to_thread(sys.stdin.buffer.readline):
            _tell(config, await answer_all(engine, msgspec.json.decode(line, type=RawWork), stop_ids))
    finally:
        await engine.close()


async def answer_all(engine: VllmEngine, work: RawWork, stop_ids: tuple[int, ...]) -> WorkDone:
    """Greedy answers straight from AsyncLLM, with the log-probability of each sampled token."""
    from vllm.inputs.engine import tokens_input

    from selfplay.agent import Sampling
    from selfplay.policy.vllm_engine import sampling_params

    llm, adapters, open_slots = engine._engine, engine._adapters, asyncio.Semaphore(work.concurrency)
    params = sampling_params(Sampling(temperature=0.0, max_tokens=work.max_tokens), stop_ids)

    async def answer(number: int, ids: list[int]) -> int:
        name = who_answers(number) if work.adapters else None
        count = 0
        async with open_slots:
            lora = adapters[name] if name else None
            async for output in llm.generate(
                tokens_input(ids), params, f"{time.monotonic_ns()}-{number}", lora_request=lora
            ):
                count = len(output.outputs[0].token_ids)
        return count

    start = time.perf_counter()
    counts = await asyncio.gather(*(answer(i, ids) for i, ids in enumerate(work.prompts)))
    return WorkDone(num_tokens=sum(counts), seconds=time.perf_counter() - start)


def _tell(config: RawConfig, result: WorkDone) -> None:
    os.write(config.results_fd, msgspec.json.encode(result) + b"\n")


def main(argument: str) -> None:
    """Run until the input ends; SIGTERM ends it and its engine at once."""
    config = msgspec.json.decode(argument, type=RawConfig)
    environ.apply(config.server)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    asyncio.run(serve(config))


if __name__ == "__main__":
    main(sys.argv[1])
