"""The engine seam: everything the server asks of whatever runs the model.

    await engine.start()
    out = await engine.generate("r1", ids, sampling, stop_ids, adapter="pro@3#7")    # None: the base model
    await engine.begin_install("pro@4#8", header)      # received beside generation
    await engine.commit_install("pro@4#8", 30.0)       # now it may be named
    await engine.drop("pro@3#7")                       # nobody uses it any more
    await engine.close()

An adapter name stands for one installation and is never used again, so no cache of an old version can serve a new one.
The server keeps the promises that engines rely on: it names only adapters that are committed and not dropped, never more
at once than the engine has slots, and only contexts that fit.
"""

from __future__ import annotations

import asyncio
import importlib.util
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Protocol

from selfplay.agent import Sampling
from selfplay.errors import EngineError, SelfplayError
from selfplay.models.machine import auto_dtype
from selfplay.wire.messages import BucketHeader, JoinWeights

if TYPE_CHECKING:
    from selfplay.policy.settings import EngineName, PolicyServerConfig


class UnfitAnswer(SelfplayError):
    """One answer whose record would be false: it is refused, and the engine goes on."""


@dataclass(frozen=True, kw_only=True)
class Sampled:
    """What an engine sampled: C tokens.

    ``ids`` [C] include the stop token when there was one; ``logprobs`` [C] are of the distribution sampled from, after
    temperature, top-k and top-p. At temperature 0 the most likely token is taken and logprobs are those of temperature 1.
    """

    ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish: Literal["stop", "length", "abort"]
    kept: tuple[tuple[int, ...], ...] = ()
    """[C] with top-k or top-p: the tokens that were left to sample from at each place, sorted; else empty."""


@dataclass(frozen=True, kw_only=True)
class EngineInfo:
    """What runs: shown at the start and in `PolicyInfo`."""

    name: str
    device: str
    dtype: str

    def __str__(self) -> str:
        return f"{self.name}, {self.dtype}, {self.device}"


class Engine(Protocol):
    """One model with many adapters. Every method may be called while others are under way.

    A cancelled call is withdrawn from the engine. Raises `EngineError` when the engine failed, `UnfitAnswer` from
    `generate`, `SyncError` from the install methods when a version cannot be installed (what is installed goes on serving).
    """

    async def start(self) -> EngineInfo:
        """Load the model; returns when requests can be served."""
        ...

    async def close(self) -> None:
        """End everything the engine started; idempotent."""
        ...

    def failure(self) -> str | None:
        """Why the engine is dead, or None while it lives."""
        ...

    async def generate(
        self, request: str, ids: Sequence[int], sampling: Sampling, stop_ids: Sequence[int], adapter: str | None
    ) -> Sampled:
        """Sample up to ``sampling.max_tokens`` tokens after ``ids`` [P], or up to the first of ``stop_ids``."""
        ...

    async def choose(
        self, request: str, ids: Sequence[int], labels: Sequence[Sequence[int]], adapter: str | None
    ) -> tuple[float, ...]:
        """Probability of each label's tokens as the continuation of ``ids``, normalised over the labels."""
        ...

    async def logprobs(self, request: str, ids: Sequence[int], adapter: str | None) -> tuple[float, ...]:
        """Teacher-forced log-probabilities [T−1] of ``ids[1:]`` given what is before each, at temperature 1."""
        ...

    async def continuations(
        self, request: str, ids: Sequence[int], answers: Sequence[Sequence[int]], adapter: str | None
    ) -> tuple[float, ...]:
        """Log-probability of each of ``answers`` (a token at least) as what follows ``ids``, at temperature 1."""
        ...

    async def abort(self, request: str) -> None:
        """End a request early: its `generate` returns what was sampled, with finish ``abort``. Idempotent."""
        ...

    async def join_weights(self, message: JoinWeights) -> None:
        """Join the group over which adapters are broadcast."""
        ...

    async def begin_install(self, name: str, header: BucketHeader) -> None:
        """Start to receive an adapter in the background; returns at once."""
        ...

    async def commit_install(self, name: str, timeout_s: float) -> dict[str, float]:
        """Wait for the adapter, verify it and make ``name`` usable. Returns timings in milliseconds.

        ``blocked_ms`` is how long the engine's own loop was held up.
        """
        ...

    async def abort_install(self, name: str) -> None:
        """Forget an adapter that is being received; idempotent."""
        ...

    async def swap(self, old: str, new: str) -> dict[str, int]:
        """From the next token on, requests on ``old`` are computed with the weights of ``new``; their cache stays.

        Returns, for every request under way on ``old``, how many of its tokens are the old weights' (maybe one more than it
        will have); one that is over is absent.
        Afterwards ``old`` may be named only by those. Raises `SyncError` when the engine cannot do it.
        """
        ...

    async def drop(self, name: str) -> None:
        """Free an installed adapter; idempotent."""
        ...


async def continue_one_by_one(
    engine: Engine, request: str, ids: Sequence[int], answers: Sequence[Sequence[int]], adapter: str | None
) -> tuple[float, ...]:
    """`Engine.continuations` by `Engine.logprobs`, for engines that keep a context's cache by themselves."""
    found = await asyncio.gather(
        *(engine.logprobs(f"{request}.{n}", [*ids, *answer], adapter) for n, answer in enumerate(answers))
    )
    return tuple(math.fsum(logprobs[len(ids) - 1 :]) for logprobs in found)


def truncates(sampling: Sampling) -> bool:
    """Whether tokens are left out of what is sampled from: then each answer says which were left in."""
    return bool(sampling.temperature) and (sampling.top_k > 0 or sampling.top_p < 1)


def resolve_engine(name: EngineName) -> Literal["vllm", "transformers", "fake"]:
    """``auto`` is vllm where it is installed, else transformers."""
    if name != "auto":
        return name
    return "vllm" if importlib.util.find_spec("vllm") else "transformers"


def resolve_dtype(config: PolicyServerConfig) -> Literal["float32", "bfloat16"]:
    """``auto`` is what the model is stored in, unless this machine only emulates it. Raises `EngineError`."""
    if config.dtype != "auto":
        return config.dtype
    path = Path(config.model) / "config.json"
    try:
        stored = json.loads(path.read_bytes())
        inner = stored.get("text_config") or stored
    except (OSError, ValueError, AttributeError) as e:
        raise EngineError(f"cannot read {path}: {e}") from e
    name = inner.get("dtype") or inner.get("torch_dtype") or stored.get("dtype") or stored.get("torch_dtype")
    return auto_dtype("float32" if name == "float32" else "bfloat16")


def make_engine(config: PolicyServerConfig) -> Engine:
    """The engine of ``config``, not yet started. Imports torch or vLLM as needed."""
    match resolve_engine(config.engine):
        case "vllm":
            from selfplay.policy.vllm_engine import VllmEngine

            return VllmEngine(config)
        case "transformers":
            from selfplay.policy.transformers_engine import TransformersEngine

            return TransformersEngine(config)
        case "fake":
            from selfplay.policy.fake import FakeEngine

            return FakeEngine(tokens_per_s=config.fake_tokens_per_s)
