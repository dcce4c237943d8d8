"""What one policy server is told at its start: plain values that cross the process border as JSON."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

EngineName = Literal["auto", "vllm", "transformers", "fake"]
DtypeName = Literal["auto", "float32", "bfloat16"]
Count = Annotated[int, Meta(ge=1)]

SPARE_VERSIONS = 4
"""Versions beyond twice the live ones that may be installed: change-overs, and opponents that wait for their match."""


class PolicyServerConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One policy server."""

    address: str
    """Where to listen: an ipc path in the runtime folder, or loopback tcp."""
    runtime_dir: str
    """The run's private folder: sockets and temporary files of the engine go there."""
    model: str
    """A local folder in Hugging Face format."""
    engine: EngineName = "auto"
    """auto: vllm where it is installed, else transformers. fake: no model at all."""
    dtype: DtypeName = "auto"
    """auto: float32 for models stored in float32, bfloat16 for all others."""
    max_model_len: Count = 2048
    """Longest context in tokens."""
    max_live_adapters: Count = 4
    """Adapter versions in one engine batch."""
    max_installed: Annotated[int, Meta(ge=0)] = 0
    """Adapter versions held in memory; 0: twice the live ones and a few."""
    max_rank: Annotated[int, Meta(ge=1, le=512)] = 8
    targets: tuple[str, ...] = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    """Projections an adapter may change."""
    whole_models: bool = False
    """Whether a version may be a whole model: every parameter, module by module. Only the transformers engine serves those."""
    max_num_seqs: Count = 64
    kv_cache_mb: Count = 512
    """KV cache of the engine on a CPU."""
    gpu_memory_utilization: Annotated[float, Meta(gt=0, le=1)] = 0.5
    device_index: Annotated[int, Meta(ge=0)] = 0
    """On GPUs: which of those that are visible this server takes, counted round and round."""
    threads: Count = 1
    """CPU threads of the engine."""
    seed: Annotated[int, Meta(ge=0, lt=2**31)] = 0
    """Seed of the engine's own sampling stream, for requests that bring none."""
    lease_s: Annotated[float, Meta(gt=0)] = 900.0
    """An episode that was neither ended nor heard of for so long no longer holds its versions."""
    sync_timeout_s: Annotated[float, Meta(gt=0)] = 60.0
    """Longest a new version may be on its way."""
    fake_tokens_per_s: Annotated[float, Meta(ge=0)] = 0.0
    """Speed of each request of the fake engine; 0: at once."""

    @property
    def installed_limit(self) -> int:
        """Most adapter versions held in memory at once."""
        return max(self.max_installed or 2 * self.max_live_adapters + SPARE_VERSIONS, self.max_live_adapters)
