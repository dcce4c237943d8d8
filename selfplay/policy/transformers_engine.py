"""The engine on plain transformers: a model in this process, driven by one thread. It starts in seconds and is the quickest
for small models and for many samples of few prompts, which it computes once (`decoding.Batch`).

The thread alternates between short jobs (scoring), letting waiting requests join, and one step of the running batch.
Adapters arrive by the same staging as in vLLM's workers and are applied per row.
"""

from __future__ import annotations

import asyncio
import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import nn

from selfplay.agent import Sampling
from selfplay.errors import EngineError, SyncError
from selfplay.policy.decoding import Batch, Row
from selfplay.policy.engine import EngineInfo, Sampled, resolve_dtype
from selfplay.policy.routed_lora import (
    Adapter,
    AdapterBank,
    build_adapter,
    chosen_logprobs,
    install_routing,
    parameter_shapes,
)
from selfplay.policy.settings import PolicyServerConfig
from selfplay.sync import Staging
from selfplay.wire.messages import BucketHeader, JoinWeights

log = logging.getLogger(__name__)
T = TypeVar("T")

Waiting = tuple[Row, asyncio.Future[None]]
"""A request and who waits for it."""

_POLL_S = 0.003
MAX_PREFILL_TOKENS = 8192
"""Prompt tokens computed between two steps of the running batch."""


def widen_head(model: Any) -> None:
    """Compute the logits in float32, whatever the model is stored in: a bfloat16 logit between 32 and 64 is a multiple of 0.25.

    The head gets weights of its own, V · D · 4 bytes, so embeddings that share them stay as they are.
    """
    head = model.get_output_embeddings()
    if head.weight.dtype == torch.float32:
        return
    wide = nn.Linear(head.in_features, head.out_features, bias=head.bias is not None, device=head.weight.device)
    wide.load_state_dict(head.state_dict())
    wide.requires_grad_(False).register_forward_pre_hook(lambda _, given: (given[0].float(),))
    model.set_output_embeddings(wide)


class TransformersEngine:
    """`Engine` on transformers."""

    def __init__(self, config: PolicyServerConfig) -> None:
        self._config = config
        self._staging: Staging[Adapter] = Staging(timeout_s=config.sync_timeout_s)
        self._wake = threading.Condition()
        self._waiting: deque[Waiting] = deque()
        self._jobs: deque[Callable[[], None]] = deque()
        self._running: dict[str, Waiting] = {}
        self._thread: threading.Thread | None = None
        self._closing = False
        self._failure: str | None = None
        self._model: Any = None
        self._shapes: dict[str, torch.Size] = {}
        self._bank = AdapterBank()
        self._batch: Batch | None = None

    async def start(self) -> EngineInfo:
        """See `Engine.start`."""
        import transformers

        await asyncio.to_thread(self._load)
        self._thread = threading.Thread(target=self._drive, name="transformers engine", daemon=True)
        self._thread.start()
        weight = next(self._model.parameters())
        return EngineInfo(
            name=f"transformers {transformers.__version__}", device=str(weight.device),
            dtype=str(weight.dtype).removeprefix("torch."),
        )  # fmt: skip

    async def close(self) -> None:
        """See `Engine.close`."""
        with self._wake:
            self._closing = True
            self._wake.notify()
        if self._thread is not None:
            await asyncio.to_thread(self._thread.join)
            self._thread = None
        self._staging.close()

    def failure(self) -> str | None:
        """See `Engine.failure`."""
        return self._failure

    async def generate(
        self, request: str, ids: Sequence[int], sampling: Sampling, stop_ids: Sequence[int], adapter: str | None
    ) -> Sampled:
        """See `Engine.generate`."""
        self._require(adapter)
        row = Row(request=request, ids=ids, sampling=sampling, stop_ids=frozenset(stop_ids), adapter=adapter)
        if sampling.seed is not None:
            row.generator = torch.Generator(self._device).manual_seed(sampling.seed)
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        with self._wake:
            self._waiting.append((row, done))
            self._wake.notify()
        try:
            await done
        except asyncio.CancelledError:
            row.aborted = True
            raise
        return Sampled(
            ids=tuple(row.sampled), logprobs=tuple(row.logprobs), finish=row.finish or "abort", kept=tuple(row.kept)
        )

    async def choose(
        self, request: str, ids: Sequence[int], labels: Sequence[Sequence[int]], adapter: str | None
    ) -> tuple[float, ...]:
        """See `Engine.choose`."""
        scores = []
        for number, label in enumerate(labels):
            logprobs = await self.logprobs(f"{request}.{number}", [*ids, *label], adapter)
            scores.append(sum(logprobs[len(ids) - 1 :]))
        best = max(scores)
        weights = [math.exp(s - best) for s in scores]
        return tuple(w / sum(weights) for w in weights)

    async def logprobs(self, request: str, ids: Sequence[int], adapter: str | None) -> tuple[float, ...]:  # noqa: ARG002
        """See `Engine.logprobs`."""
        self._require(adapter)
        return await self._do(lambda: self._score(ids, adapter))

    async def continuations(
        self,
        request: str,  # noqa: ARG002
        ids: Sequence[int],
        answers: Sequence[Sequence[int]],
        adapter: str | None,
    ) -> tuple[float, ...]:
        """See `Engine.continuations`. The context is computed once, and kept for who asks again."""
        self._require(adapter)
        return await self._do(lambda: self._running_batch.continuations(adapter, tuple(ids), answers))

    async def abort(self, request: str) -> None:
        """See `Engine.abort`."""
        with self._wake:
            for row, _ in (*self._waiting, *self._running.values()):
                if row.request == request:
                    row.aborted = True

    async def join_weights(self, message: JoinWeights) -> None:
        """See `Engine.join_weights`."""
        await asyncio.to_thread(
            self._staging.join, message.transport, address=message.address, rank=message.rank,
            world_size=message.world_size, timeout_s=message.timeout_s,
        )  # fmt: skip

    async def begin_install(self, name: str, header: BucketHeader) -> None:
        """See `Engine.begin_install`."""
        like = next(self._model.parameters())
        self._staging.begin(name, header, lambda tensors, h: build_adapter(tensors, h, like, self._shapes))

    async def commit_install(self, name: str, timeout_s: float) -> dict[str, float]:
        """See `Engine.commit_install`."""
        started, deadline = time.perf_counter(), time.monotonic() + timeout_s
        while not self._staging.ready(name) and time.monotonic() < deadline:
            await asyncio.sleep(_POLL_S)
        adapter = self._staging.take(name, 0.0)
        unknown = sorted(set(adapter) - {m.name for m in self._model.modules() if hasattr(m, "base")})
        if unknown:
            raise SyncError(f"the engine has no layer for {unknown[0]}, which the adapter changes")
        self._bank.adapters[name] = adapter
        return {"blocked_ms": 0.0, "commit_ms": (time.perf_counter() - started) * 1e3}

    async def abort_install(self, name: str) -> None:
        """See `Engine.abort_install`."""
        self._staging.abort(name)

    async def swap(self, old: str, new: str) -> dict[str, int]:
        """See `Engine.swap`."""

        def swap() -> dict[str, int]:
            self._bank.adapters[old] = self._bank.adapters[new]
            with self._wake:
                waiting = {row.request: 0 for row, _ in self._waiting if row.adapter == old}
            # Of a running row the next token's distribution is computed already, with the old weights.
            running = {row.request: len(row.sampled) + 1 for row, _ in self._running.values() if row.adapter == old}
            return waiting | running

        return await self._do(swap)

    async def drop(self, name: str) -> None:
        """See `Engine.drop`."""
        await self._do(lambda: self._forget(name))

    # ── the thread ────────────────────────────────────────────────────────────────────────────────

    @property
    def _device(self) -> torch.device:
        device: torch.device = next(self._model.parameters()).device
        return device

    def _load(self) -> None:
        from transformers import AutoModelForCausalLM

        torch.set_num_threads(self._config.threads)
        dtype = getattr(torch, resolve_dtype(self._config))
        try:
            model = AutoModelForCausalLM.from_pretrained(
                self._config.model, dtype=dtype, local_files_only=True, trust_remote_code=False
            )
        except (OSError, ValueError, KeyError, RuntimeError) as e:
            raise EngineError(f"transformers cannot load {self._config.model}: {e}") from e
        self._model = model.eval().requires_grad_(False).to("cuda" if torch.cuda.is_available() else "cpu")
        self._shapes = parameter_shapes(self._model)
        self._bank = install_routing(self._model, self._config.targets, whole=self._config.whole_models)
        if not self._config.whole_models:
            widen_head(self._model)

    @property
    def _running_batch(self) -> Batch:
        if self._batch is None:
            raise EngineError("the transformers engine is not running")
        return self._batch

    def _forget(self, name: str) -> None:
        adapter = self._bank.adapters.pop(name, None)
        if adapter is not None:
            self._running_batch.prompts.forget(adapter)

    def _drive(self) -> None:
        generator = torch.Generator(self._device).manual_seed(self._config.seed)
        batch = self._batch = Batch(self._model, self._bank, generator, prompt_tokens=self._prompt_tokens())
        try:
            while self._turn(batch):
                pass
        except Exception as e:  # the thread's boundary: whoever waits for it is told
            log.exception("the engine's thread failed")
            self._failure = f"the transformers engine failed: {e}"
            _settle_soon([done for _, done in (*self._running.values(), *self._waiting)], EngineError(self._failure))

    def _turn(self, batch: Batch) -> bool:
        """One round of the thread; False when it is time to end."""
        with self._wake:
            self._wake.wait_for(lambda: self._closing or self._jobs or self._waiting or batch.rows)
            if self._closing:
                return False
            jobs, self._jobs = list(self._jobs), deque()
            newcomers = self._admit(len(batch.rows))
        for job in jobs:
            job()
        if newcomers:
            batch.join(newcomers)
        if batch.rows:
            _settle_soon([self._running.pop(row.request)[1] for row in batch.step()])
        return True

    def _admit(self, num_running: int) -> list[Row]:
        """Waiting rows that fit, in order; those withdrawn meanwhile are answered at once."""
        rows: list[Row] = []
        prompts: set[tuple[str | None, tuple[int, ...]]] = set()
        while self._waiting and num_running + len(rows) < self._config.max_num_seqs:
            row, done = self._waiting[0]
            prompts.add((row.adapter, tuple(row.ids)))
            if rows and sum(len(ids) for _, ids in prompts) > MAX_PREFILL_TOKENS:
                break
            self._waiting.popleft()
            if row.aborted:
                _settle_soon([done])
                continue
            rows.append(row)
            self._running[row.request] = (row, done)
        return rows

    def _prompt_tokens(self) -> int:
        """How many prompt tokens fit into ``kv_cache_mb``."""
        c = self._model.config.get_text_config()
        heads = getattr(c, "num_key_value_heads", None) or c.num_attention_heads
        width = getattr(c, "head_dim", None) or c.hidden_size // c.num_attention_heads
        per_token = 2 * c.num_hidden_layers * heads * width * self._model.dtype.itemsize
        return int((self._config.kv_cache_mb << 20) // per_token)

    @torch.inference_mode()
    def _score(self, ids: Sequence[int], adapter: str | None) -> tuple[float, ...]:
        tokens = torch.tensor([list(ids)], device=self._device)
        self._bank.route([adapter])
        logits = self._model(input_ids=tokens, use_cache=False).logits[0, :-1]
        return tuple(chosen_logprobs(logits, tokens[0, 1:]).tolist())

    async def _do(self, work: Callable[[], T]) -> T:
        """Run ``work`` in the thread, between two steps."""
        loop, done = asyncio.get_running_loop(), asyncio.get_running_loop().create_future()

        def job() -> None:
            result = work()
            loop.call_soon_threadsafe(_settle, done, result)

        with self._wake:
            if self._failure or self._closing:
                raise EngineError(self._failure or "the engine is closed")
            self._jobs.append(job)
            self._wake.notify()
        result: T = await done
        return result

    def _require(self, adapter: str | None) -> None:
        if self._failure:
            raise EngineError(self._failure)
        if adapter is not None and adapter not in self._bank.adapters:
            raise EngineError(f"adapter {adapter} is not installed")


def _settle_soon(futures: Sequence[asyncio.Future[None]], error: Exception | None = None) -> None:
    """Wake whoever waits for these requests, from the thread: one call of their loop for all of them."""
    if futures:
        futures[0].get_loop().call_soon_threadsafe(_settle_all, futures, error)


def _settle_all(futures: Sequence[asyncio.Future[None]], result: object) -> None:
    for future in futures:
        _settle(future, result)


def _settle(future: asyncio.Future[Any], result: object) -> None:
    if future.done():
        return  # cancelled meanwhile
    if isinstance(result, Exception):
        future.set_exception(result)
    else:
        future.set_result(result)
