"""Run as a program: one vLLM engine, one adapter by way of memory and the same by vLLM's own loading from disk.

python -m tests.engine_disk MODEL ADAPTER_FOLDER RUNTIME_FOLDER  → one line of JSON
"""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path

from selfplay.policy import PolicyServerConfig, environ


async def answers(config: PolicyServerConfig, folder: str) -> list[object]:
    """(ids, logprobs) from memory, then from disk."""
    from vllm.lora.request import LoRARequest

    from selfplay.agent import Sampling
    from selfplay.policy.vllm_engine import VllmEngine
    from selfplay.store.adapters import AdapterStore
    from selfplay.types import PolicyVersion

    engine = VllmEngine(config)
    await engine.start()
    try:
        version = PolicyVersion("pro", 0)
        await engine.begin_install("memory", AdapterStore(Path(folder)).bucket_header(version))
        await engine.commit_install("memory", 30)
        engine._adapters["disk"] = LoRARequest("disk", 999, str(AdapterStore(Path(folder)).path(version)))
        sampling, prompt = Sampling(temperature=0.0, max_tokens=24), list(range(60, 90))
        found = [await engine.generate(n, prompt, sampling, (), n) for n in ("memory", "disk")]
        base = await engine.generate("base", prompt, sampling, (), None)
        return [[list(f.ids), list(f.logprobs)] for f in (*found, base)]
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
    print("\n" + json.dumps(asyncio.run(answers(settings, sys.argv[2]))))
