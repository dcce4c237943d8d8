"""What tests mix into vLLM's worker: `AdapterWorker`, and a look at the weights below all adapters."""

from __future__ import annotations

from typing import Any

from tests.base_digest import base_digest

from selfplay.policy.vllm_worker import AdapterWorker


class HashingWorker(AdapterWorker):
    """`AdapterWorker` that can say what the base is."""

    def base_digest(self) -> str:
        runner: Any = self.model_runner  # type: ignore[attr-defined]
        return base_digest(runner.model)
