"""The policy server: one process that serves the base model and every live adapter version in the same batches.

    ToPolicy ──► server ──► service ──► rendering (chat → token delta)
                               │   └──► versions (which agent@n) ──► slots (how many at once)
                               └──────► engine seam: vllm | transformers | fake ──► FromPolicy

Importing this package is light; engines import torch and vLLM when they are made.
"""

from selfplay.policy.settings import PolicyServerConfig

__all__ = ["PolicyServerConfig"]
