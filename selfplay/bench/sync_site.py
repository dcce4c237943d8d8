"""What ``selfplay bench sync`` measures on: the real vLLM engine, a sender per transport, and a constant load.

In: a resolved model. Out: times of single publications, by transport and by vLLM's ordinary disk route, and of a fixed
amount of generation. Everything runs through the same classes as a training run; only the trainer is left out, its
tensors are made up.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from selfplay.agent import Sampling
from selfplay.errors import RunError
from selfplay.models import ResolvedModel
from selfplay.models.machine import auto_dtype
from selfplay.models.tensor_header import read_tensor_header
from selfplay.store.atomic import new_folder
from selfplay.wire.messages import JoinWeights

if TYPE_CHECKING:
    from torch import Tensor

    from selfplay.policy.vllm_engine import VllmEngine
    from selfplay.sync import DtypeName, Sender, TransportName

RANKS = {"float32": 8, "bfloat16": 16}
"""By dtype, so that an adapter on all projections of SmolLM2-135M has 9.8 MB either way."""
LARGE_RANKS = {"float32": 64, "bfloat16": 128}
"""Likewise 78 MB: what a model of seven billion parameters has at rank 16, in bfloat16."""
PROMPT_TOKENS, REPLY_TOKENS = 48, 24
"""Of the load."""
FIRST_PROMPT_TOKENS = 4
"""Of the request for a first token: short, so that what is timed is the way of the adapter and not the prompt's."""
CONCURRENCY = 16
SLOTS, INSTALLED = 6, 8
"""Adapters that may share a batch, and that are kept at all: those of the load and a step of `STEP_AGENTS`."""
STEP_AGENTS = 4
"""Agents that a training step updates, each with a new version to publish."""
TIMEOUT_S = 60.0
LOADED = ("one@0", "two@0")
"""Adapters the load samples from, besides the base."""

Route = Literal["gloo", "shm", "file"]


@dataclass(frozen=True, kw_only=True)
class Published:
    """Milliseconds since the trainer's step ended, of the new versions of one agent or several."""

    usable_ms: float
    """Requests may name every new version."""
    first_token_ms: float
    """Every new version has sampled a token."""
    pause_ms: float
    """How long the engine's own loop was held up until they were usable; filling their slots comes with the first token."""


class Site:
    """One engine with its senders. ``async with Site.open(...) as site``."""

    def __init__(
        self, engine: VllmEngine, model: ResolvedModel, dtype: DtypeName, rank: int, memory: Path, disk: Path
    ) -> None:
        self.engine, self._dtype, self._memory, self._disk = engine, dtype, memory, disk
        self.tensors: dict[str, Tensor] = {}
        self.config: dict[str, Any] = {
            "r": rank, "lora_alpha": 2 * rank, "target_modules": list(model.linear_names), "peft_type": "LORA",
        }  # fmt: skip
        self._numbers = itertools.count()
        self._senders: dict[str, Sender] = {}
        self.blocked_ms: list[float] = []
        self.num_bytes = 0

    @classmethod
    @contextlib.asynccontextmanager
    async def open(cls, model: ResolvedModel, memory: Path, disk: Path, *, large: bool = False) -> AsyncIterator[Site]:
        """Start the engine, join the group and install the adapters of the load. ``memory``: the runtime folder.

        Once per process: the engine's is forked, and would hang with a copy of threads that had computed before.
        """
        from selfplay.policy import environ
        from selfplay.policy.settings import PolicyServerConfig

        dtype = auto_dtype(model.default_dtype)
        rank = (LARGE_RANKS if large else RANKS)[dtype]
        config = PolicyServerConfig(
            address=f"ipc://{memory}/unused", runtime_dir=str(memory), model=str(model.path), engine="vllm",
            dtype=dtype, max_model_len=256, max_live_adapters=SLOTS, max_installed=INSTALLED, max_rank=rank,
            max_num_seqs=CONCURRENCY, kv_cache_mb=256, targets=model.linear_names,
        )  # fmt: skip
        environ.apply(config)
        from selfplay.policy.vllm_engine import VllmEngine

        site = cls(VllmEngine(config), model, dtype, rank, memory, disk)
        try:
            await site.engine.start()
            site.tensors = adapter_tensors(model, rank)  # only now: it starts the threads that a fork must not copy
            await site._join()
            for name in LOADED:
                await site.install(name, "gloo")
            yield site
        finally:
            for sender in site._senders.values():
                sender.close()
            await site.engine.close()

    async def publish(self, route: Route, agents: int = 1) -> Published:
        """From the trainer's tensors to a token of each agent's new version; they are dropped after.

        One version at a time, as a controller publishes them; the tokens are asked for at once.
        """
        names = self._names("new", agents)
        start, before = time.perf_counter(), len(self.blocked_ms)
        for name in names:
            await self.install(name, route)
        usable = time.perf_counter()
        await self._first_tokens(names)
        took = _published(start, usable, sum(self.blocked_ms[before:]))
        for name in names:
            await self.engine.drop(name)
        return took

    async def publish_by_disk(self, agents: int = 1) -> Published:
        """The same by the usual way: save, fsync and rename, then vLLM loads the folder."""
        names, requests, pause_s = self._names("disk", agents), [], 0.0
        start = time.perf_counter()
        for name in names:
            await asyncio.to_thread(self._save, name)
            request, saved = self._disk_request(name), time.perf_counter()
            await self.engine._engine.add_lora(request)  # the engine loads between two steps
            pause_s += time.perf_counter() - saved
            self.engine._adapters[name] = request
            requests.append(request)
        usable = time.perf_counter()
        await self._first_tokens(names)
        took = _published(start, usable, pause_s * 1e3)
        for name, request in zip(names, requests, strict=True):
            del self.engine._adapters[name]
            await self.engine._engine.remove_lora(request.lora_int_id)
        return took

    async def first_token_ms(self) -> float:
        """The same request as after a publication, to a version that is long there."""
        start = time.perf_counter()
        await self.sample(f"alone-{next(self._numbers)}", LOADED[0], 1, FIRST_PROMPT_TOKENS)
        return (time.perf_counter() - start) * 1e3

    async def install(self, name: str, route: Route) -> None:
        """Pack, announce, send and commit, as a controller and a trainer do it."""
        from selfplay.sync import pack

        address = str(self._disk / "weights" if route == "file" else self._memory / "weights")
        bucket = await asyncio.to_thread(
            pack, self.tensors, dtype=self._dtype, transport=route, address=address, adapter_config=self.config
        )
        await self.engine.begin_install(name, bucket.header)
        await asyncio.to_thread(self._senders[route].send, bucket, TIMEOUT_S)
        timings = await self.engine.commit_install(name, TIMEOUT_S)
        self.blocked_ms.append(timings["blocked_ms"])
        self.num_bytes = bucket.header.num_bytes

    async def sample(self, request: str, adapter: str | None, num_tokens: int, prompt_tokens: int) -> None:
        """Sample exactly ``num_tokens`` after a prompt that depends on the request only."""
        start = sum(request.encode()) % 200
        ids = [start + i % 50 for i in range(prompt_tokens)]
        out = await self.engine.generate(request, ids, Sampling(max_tokens=num_tokens, seed=start), (), adapter)
        if len(out.ids) != num_tokens:
            raise RunError(f"the engine sampled {len(out.ids)} tokens where {num_tokens} were asked for")

    async def generate_all(self, num_requests: int) -> float:
        """Seconds for ``num_requests`` replies, `CONCURRENCY` at a time, spread over the base and the loaded adapters."""
        run, waiting = next(self._numbers), iter(range(num_requests))

        async def client() -> None:
            for i in waiting:
                await self.sample(
                    f"load-{run}-{i}", (None, *LOADED)[i % (1 + len(LOADED))], REPLY_TOKENS, PROMPT_TOKENS
                )

        start = time.perf_counter()
        await asyncio.gather(*(client() for _ in range(CONCURRENCY)))
        return time.perf_counter() - start

    async def _join(self) -> None:
        address = f"file://{self._memory}/weights-rendezvous"
        join = JoinWeights(
            request=0, transport="gloo", address=address, rank=1, world_size=2, timeout_s=TIMEOUT_S
        )  # fmt: skip
        sender, _ = await asyncio.gather(asyncio.to_thread(_sender, "gloo", address), self.engine.join_weights(join))
        self._senders = {"gloo": sender, "shm": _sender("shm", ""), "file": _sender("file", "")}

    def _names(self, stem: str, agents: int) -> list[str]:
        number = next(self._numbers)
        return [f"{stem}-{agent}@{number}" for agent in range(agents)]

    async def _first_tokens(self, names: list[str]) -> None:
        await asyncio.gather(*(self.sample(name, name, 1, FIRST_PROMPT_TOKENS) for name in names))

    def _save(self, name: str) -> None:
        import torch

        from selfplay.sync import save_adapter

        with new_folder(self._disk / name) as folder:
            save_adapter(folder, self.tensors, self.config, dtype=getattr(torch, self._dtype))

    def _disk_request(self, name: str) -> Any:
        from vllm.lora.request import LoRARequest

        return LoRARequest(name, next(self.engine._ids), str(self._disk / name))


def _published(start: float, usable: float, pause_ms: float) -> Published:
    now = time.perf_counter()
    return Published(usable_ms=(usable - start) * 1e3, first_token_ms=(now - start) * 1e3, pause_ms=pause_ms)


def adapter_tensors(model: ResolvedModel, rank: int) -> dict[str, Tensor]:
    """Random LoRA matrices for every projection of the model, float32 as a trainer has them."""
    import torch

    generator, out = torch.Generator().manual_seed(0), {}
    for name, (rows, columns) in sorted(projections(model).items()):
        stem = f"base_model.model.{name.removesuffix('.weight')}"
        out[f"{stem}.lora_A.weight"] = torch.randn(rank, columns, generator=generator) / columns**0.5
        out[f"{stem}.lora_B.weight"] = torch.randn(rows, rank, generator=generator) * 0.01
    return out


def projections(model: ResolvedModel) -> dict[str, tuple[int, int]]:
    """Name → (outputs, inputs) of the matrices a LoRA adapter is put on, read from the weight files' headers."""
    found: dict[str, tuple[int, int]] = {}
    for path in sorted(model.path.glob("*.safetensors")):
        for tensor in read_tensor_header(path).tensors:
            parts = tensor.name.split(".")
            if parts[-1] == "weight" and parts[-2:-1] and parts[-2] in model.linear_names:
                rows, columns = tensor.shape
                found[tensor.name] = (rows, columns)
    return found


def _sender(transport: TransportName, address: str) -> Sender:
    from selfplay.sync import make_sender

    return make_sender(transport, address=address, world_size=2, timeout_s=TIMEOUT_S)
