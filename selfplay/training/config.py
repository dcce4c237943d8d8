"""What a trainer rank is told at its start: the JSON argument of ``python -m selfplay.training.rank``.

Light on purpose (no torch): the launcher imports it to start ranks.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from selfplay.config import Config


class RankConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One rank of a trainer."""

    model: str
    """Folder of the base model."""
    config: Config
    dtype: Literal["float32", "bfloat16"]
    """dtype of the frozen base; adapters are float32 always."""
    bucket_dtype: Literal["float32", "bfloat16", "float16"]
    """dtype in which adapters travel to the engines."""
    rank: Annotated[int, Meta(ge=0)]
    world_size: Annotated[int, Meta(ge=1)]
    controller: str
    """Address of the controller's socket."""
    runtime_dir: str
    """The run's private runtime folder: rendezvous files of the ranks."""
    adapters: str
    """Root of the run's adapter store."""
    agents: tuple[str, ...]
    """Trained agents."""
    versions: dict[str, int]
    """Which version of each agent the weights at start are."""
    checkpoint: str = ""
    """Trainer folder of the checkpoint to go on from; empty for fresh adapters."""
    device: Literal["cpu", "cuda"] = "cpu"
