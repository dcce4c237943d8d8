"""Run as a program: one vLLM engine, one adapter by way of memory and the same by vLLM's own loading from disk; then many
versions of two adapters, one after the other, and the base weights before and after.

python -m tests.engine_disk MODEL ADAPTER_FOLDER RUNTIME_FOLDER NUM_VERSIONS  → one line of JSON
"""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

from selfplay.policy import PolicyServerConfig, environ
from selfplay.types import PolicyVersion

WORKER = "tests.hashing_worker.HashingWorker"
PROMPT = list(range(60, 90))


async def change_over(engine: Any, folder: str, num_versions: int) -> int:
    """So many versions installed, answering and dropped, of the adapters pro@0 and pro@1 in turn; how many answers differ
    from the first one of the same adapter."""
    from selfplay.agent import Sampling
    from selfplay.store.adapters import AdapterStore

    said: dict[int, set[tuple[int, ...]]] = {0: set(), 1: set()}
    for n in range(num_versions):
        name = f"version-{n}"
        await engine.begin_install(name, AdapterStore(Path(folder)).bucket_header(PolicyVersion("pro", n % 2)))
        await engine.commit_install(name, 60)
        if n:
            await engine.drop(f"version-{n - 1}")
        said[n % 2].add((await engine.generate(name, PROMPT, Sampling(temperature=0.0, max_tokens=2), (), name)).ids)
    return len(said[0]) + len(said[1]) - 2


async def answers(config: PolicyServerConfig, folder: str, num_versions: int) -> dict[str, object]:
    """``memory``, ``disk``, ``base``: [ids, logprobs]; ``before``, ``after``: digests of the base; ``different``: answers."""
    from vllm.lora.request import LoRARequest

    from selfplay.agent import Sampling
    from selfplay.policy import vllm_engine
    from selfplay.store.adapters import AdapterStore

    vllm_engine._EXTENSION = WORKER
    engine = vllm_engine.VllmEngine(config)
    await engine.start()
    try:
        (before,) = await engine._rpc("base_digest")
        version = PolicyVersion("pro", 0)
        await engine.begin_install("memory", AdapterStore(Path(folder)).bucket_header(version))
        await engine.commit_install("memory", 30)
        engine._adapters["disk"] = LoRARequest("disk", 999, str(AdapterStore(Path(folder)).path(version)))
        sampling, found = Sampling(temperature=0.0, max_tokens=24), {}
        for name, adapter in (("memory", "memory"), ("disk", "disk"), ("base", None)):
            sampled = await engine.generate(name, PROMPT, sampling, (), adapter)
            found[name] = [list(sampled.ids), list(sampled.logprobs)]
        different = await change_over(engine, folder, num_versions)
        (after,) = await engine._rpc("base_digest")
        return {**found, "before": before, "after": after, "different": different}
    finally:
        await engine.close()


if __name__ == "__main__":
    settings = PolicyServerConfig(
        address="ipc:///none",
        runtime_dir=sys.argv[3],
        model=sys.argv[1],
        dtype="bfloat16",
        max_model_len=256,
        kv_cache_mb=32,
    )
    environ.apply(settings)
    print("\n" + json.dumps(asyncio.run(answers(settings, sys.argv[2], int(sys.argv[4])))))
