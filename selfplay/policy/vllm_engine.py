"""The vLLM engine: AsyncLLM with many adapters in one batch, each version under a name, id and path of its own.

vLLM gets nothing of its defaults from the model folder: every sampling parameter is sent, stop tokens are ours, its
tokenizer is not even loaded. Its log-probabilities are those of the distribution it sampled from.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import math
import os
import time
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import msgspec
import vllm
from vllm import SamplingParams
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.inputs.engine import tokens_input
from vllm.lora.request import LoRARequest
from vllm.platforms import current_platform
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError, EngineGenerateError

from selfplay.agent import Sampling
from selfplay.errors import EngineError, SyncError
from selfplay.policy.engine import (
    EngineInfo,
    Sampled,
    UnfitAnswer,
    continue_one_by_one,
    resolve_dtype,
    truncates,
)
from selfplay.policy.settings import PolicyServerConfig
from selfplay.wire.messages import BucketHeader, JoinWeights

log = logging.getLogger(__name__)

RANKS: tuple[Literal[1, 8, 16, 32, 64, 128, 256, 320, 512], ...] = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""The LoRA ranks vLLM can be sized for."""
MAX_LABELS = 64
EQUALS = 32
"""Tokens looked at beyond top-k: those as likely as the k-th are left to sample from too, and in bfloat16 they are common."""
MISSING_MASS = 1e-3
"""Probability of tokens that were left to sample from and not seen; more than rounding, and the record would be false."""
CPU_BLOCK_SIZE = 32
CLOSE_S = 0.5
"""How long the engine process may take to end by itself; it holds nothing that would be lost."""
_SCHEME = "mem://"
_PENDING = "pending"
_POLL_S = 0.003
_FIRST_POLL_S = 0.0005
"""What is not there yet is asked for again after this, then after twice as long, up to `_POLL_S`."""
_EXTENSION = "selfplay.policy.vllm_worker.AdapterWorker"


class VllmEngine:
    """`Engine` on vLLM. ``correct_kernel=False`` keeps vLLM's own CPU adapter kernel, to measure against."""

    def __init__(self, config: PolicyServerConfig, *, correct_kernel: bool = True) -> None:
        self._config, self._correct_kernel = config, correct_kernel
        self._llm: AsyncLLM | None = None
        self._ids = itertools.count(1)
        self._adapters: dict[str, LoRARequest] = {}
        self._arriving: dict[str, LoRARequest] = {}
        self._open: dict[str, str | None] = {}
        """Request → adapter, while it is under way."""
        self._closed = False

    async def start(self) -> EngineInfo:
        """See `Engine.start`."""
        try:
            self._llm = _launch(engine_args(self._config))
            (setup,) = await self._rpc("selfplay_setup", self._config.sync_timeout_s, self._correct_kernel)
        except (RuntimeError, ValueError, OSError) as e:
            raise EngineError(f"vLLM did not start on {self._config.model}: {e}") from e
        dtype = str(self._llm.model_config.dtype).removeprefix("torch.")
        if setup["corrected_layers"]:
            log.info(
                "adapter kernel: %d layers use selfplay's CPU kernel in place of vLLM's", setup["corrected_layers"]
            )
        log.info("engine process %d, %d threads", setup["pid"], setup["threads"])
        return EngineInfo(name=f"vllm {vllm.__version__}", device=setup["device"], dtype=dtype)

    async def close(self) -> None:
        """See `Engine.close`."""
        self._closed = True
        if self._llm is not None:
            self._llm.shutdown(timeout=CLOSE_S)
            # The output handler is cancelled by shutdown; let it end before the loop does.
            if (handler := self._llm.output_handler) is not None:
                with contextlib.suppress(asyncio.CancelledError):
                    await handler
            self._llm = None

    def failure(self) -> str | None:
        """See `Engine.failure`."""
        if self._llm is None or self._closed or not self._llm.errored:
            return None
        return "vLLM's engine process ended"

    async def generate(
        self, request: str, ids: Sequence[int], sampling: Sampling, stop_ids: Sequence[int], adapter: str | None
    ) -> Sampled:
        """See `Engine.generate`."""
        output = await self._run(request, ids, sampling_params(sampling, stop_ids), adapter)
        logprobs = tuple(
            float(position[token].logprob)
            for token, position in zip(output.token_ids, output.logprobs or (), strict=True)
        )
        kept = tuple(_kept(position, sampling) for position in output.logprobs or ()) if truncates(sampling) else ()
        finish = "abort" if output.finish_reason == "abort" else "stop" if output.finish_reason == "stop" else "length"
        return Sampled(ids=tuple(output.token_ids), logprobs=logprobs, finish=finish, kept=kept)  # type: ignore[arg-type]

    async def choose(
        self, request: str, ids: Sequence[int], labels: Sequence[Sequence[int]], adapter: str | None
    ) -> tuple[float, ...]:
        """See `Engine.choose`."""
        if len(labels) > MAX_LABELS:
            raise EngineError(f"{len(labels)} labels in one question; at most {MAX_LABELS} can be asked")
        if all(len(label) == 1 for label in labels):
            tokens = [label[0] for label in labels]
            params = plain_params(max_tokens=1, logprobs=len(tokens), allowed_token_ids=tokens)
            (position,) = (await self._run(request, ids, params, adapter)).logprobs
            return normalised([float(position[t].logprob) for t in tokens])
        scores = []
        for number, label in enumerate(labels):
            logprobs = await self.logprobs(f"{request}.{number}", [*ids, *label], adapter)
            scores.append(sum(logprobs[len(ids) - 1 :]))
        return normalised(scores)

    async def logprobs(self, request: str, ids: Sequence[int], adapter: str | None) -> tuple[float, ...]:
        """See `Engine.logprobs`."""
        params = plain_params(max_tokens=1, prompt_logprobs=0)
        output = await self._run(request, ids, params, adapter, whole=True)
        positions = output.prompt_logprobs[1:]
        return tuple(float(p[token].logprob) for token, p in zip(ids[1:], positions, strict=True))

    async def continuations(
        self, request: str, ids: Sequence[int], answers: Sequence[Sequence[int]], adapter: str | None
    ) -> tuple[float, ...]:
        """See `Engine.continuations`."""
        return await continue_one_by_one(self, request, ids, answers, adapter)

    async def abort(self, request: str) -> None:
        """See `Engine.abort`. Asked again until the request has ended: one that is just being added does not hear it."""
        while request in self._open:
            await self._engine.abort(request)
            await asyncio.sleep(_POLL_S)

    async def join_weights(self, message: JoinWeights) -> None:
        """See `Engine.join_weights`."""
        await self._rpc("selfplay_join", msgspec.msgpack.encode(message))
        while (states := await self._rpc("selfplay_joined")).count(_PENDING):
            await asyncio.sleep(_POLL_S)
        if error := next(filter(None, states), ""):
            raise SyncError(error)

    async def begin_install(self, name: str, header: BucketHeader) -> None:
        """See `Engine.begin_install`."""
        request = LoRARequest(name, next(self._ids), _SCHEME + name)
        errors = await self._rpc("selfplay_begin", name, request.lora_int_id, msgspec.msgpack.encode(header))
        if error := next(filter(None, errors), ""):
            raise SyncError(error)
        self._arriving[name] = request

    async def commit_install(self, name: str, timeout_s: float) -> dict[str, float]:
        """See `Engine.commit_install`."""
        if name not in self._arriving:
            raise SyncError(f"{name} is not on its way")
        deadline, started, blocked_ms, wait_s = time.monotonic() + timeout_s, time.perf_counter(), 0.0, _FIRST_POLL_S
        while True:
            replies = await self._rpc("selfplay_commit", name)
            if error := next((r["error"] for r in replies if r["state"] == "failed"), ""):
                await self.abort_install(name)
                raise SyncError(error)
            blocked_ms = max([blocked_ms, *(r.get("blocked_ms", 0.0) for r in replies)])
            if all(r["state"] == "done" for r in replies):
                break
            if time.monotonic() > deadline:
                await self.abort_install(name)
                raise SyncError(f"{name} did not arrive within {timeout_s:g} s")
            await asyncio.sleep(wait_s)
            wait_s = min(_POLL_S, 2 * wait_s)
        self._adapters[name] = self._arriving.pop(name)
        return {"blocked_ms": blocked_ms, "commit_ms": (time.perf_counter() - started) * 1e3}

    async def abort_install(self, name: str) -> None:
        """See `Engine.abort_install`."""
        self._arriving.pop(name, None)
        await self._rpc("selfplay_abort", name)

    async def swap(self, old: str, new: str) -> dict[str, int]:
        """See `Engine.swap`. Workers count what each request has sampled; one they have not seen has sampled nothing."""
        if new not in self._adapters or old not in self._adapters:
            raise SyncError(f"{old} cannot go on as {new}: both must be installed")
        replies = await self._rpc("selfplay_swap", old, self._adapters[old].lora_int_id, new)
        if error := next((r["error"] for r in replies if r["error"]), ""):
            raise SyncError(error)
        counts: dict[str, int] = replies[0]["counts"]
        over = set(replies[0]["over"])
        return {r: counts.get(r, 0) for r, name in self._open.items() if name == old and r not in over}

    async def drop(self, name: str) -> None:
        """See `Engine.drop`."""
        if self._adapters.pop(name, None) is not None:
            await self._rpc("selfplay_drop", name)

    @property
    def _engine(self) -> AsyncLLM:
        if self._llm is None:
            raise EngineError("the vLLM engine is not running")
        return self._llm

    async def _rpc(self, method: str, *args: object) -> list[Any]:
        """Call a method of `vllm_worker.AdapterWorker` on every worker, between two steps."""
        try:
            return list(await self._engine.collective_rpc(method, args=args))
        except EngineDeadError as e:
            raise EngineError(f"vLLM's engine died: {e}") from e

    async def _run(
        self, request: str, ids: Sequence[int], params: SamplingParams, adapter: str | None, *, whole: bool = False
    ) -> Any:
        """The one (final) output of a request; the whole `RequestOutput` when ``whole``."""
        lora = None if adapter is None else self._adapters.get(adapter)
        if adapter is not None and lora is None:
            raise EngineError(f"adapter {adapter} is not installed")  # never let vLLM look for it: it would die
        final: Any = None
        self._open[request] = adapter
        try:
            async for output in self._engine.generate(tokens_input(list(ids)), params, request, lora_request=lora):
                final = output
        except (EngineDeadError, EngineGenerateError) as e:
            raise EngineError(f"vLLM failed on request {request}: {e.__cause__ or e}") from e
        finally:
            del self._open[request]
        if final is None or not final.outputs:
            raise EngineError(f"vLLM gave no output for request {request}")
        return final if whole else final.outputs[0]


def _launch(args: AsyncEngineArgs) -> AsyncLLM:
    """Start the engine's process: spawned beside CUDA, forked on a CPU.

    vLLM spawns there too, which imports vLLM a second time and doubles the start. Forking is safe at this point: nothing
    was computed yet, so no thread pool exists that would be missing in the child, and the engine makes its own sockets.
    """
    config = args.create_engine_config()
    if current_platform.is_cpu():
        os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "fork"
    return AsyncLLM.from_vllm_config(config)


def engine_args(config: PolicyServerConfig) -> AsyncEngineArgs:
    """vLLM's arguments for ``config``, nothing left to the model folder."""
    rank = next(r for r in RANKS if r >= config.max_rank)
    on_cpu = current_platform.is_cpu()
    memory: dict[str, Any] = {"gpu_memory_utilization": config.gpu_memory_utilization}
    if on_cpu:
        memory = {
            "kv_cache_memory_bytes": config.kv_cache_mb << 20,
            "block_size": CPU_BLOCK_SIZE,
            "enforce_eager": True,
        }
    return AsyncEngineArgs(
        model=config.model, dtype=resolve_dtype(config), seed=config.seed, max_model_len=config.max_model_len,
        max_num_seqs=config.max_num_seqs, generation_config="vllm", skip_tokenizer_init=True, trust_remote_code=False,
        enable_prefix_caching=True, logprobs_mode="processed_logprobs", max_logprobs=MAX_LABELS + EQUALS,
        enable_lora=True, max_loras=config.max_live_adapters, max_cpu_loras=config.installed_limit, max_lora_rank=rank,
        lora_target_modules=list(config.targets), worker_extension_cls=_EXTENSION,
        disable_log_stats=True, enable_log_requests=False, **memory,
    )  # fmt: skip


def sampling_params(sampling: Sampling, stop_ids: Sequence[int]) -> SamplingParams:
    """Every parameter that changes what is sampled, explicitly."""
    return plain_params(
        temperature=sampling.temperature, top_p=sampling.top_p, top_k=sampling.top_k, seed=sampling.seed,
        max_tokens=sampling.max_tokens, stop_token_ids=list(stop_ids),
        logprobs=min(sampling.top_k or MAX_LABELS, MAX_LABELS) + EQUALS if truncates(sampling) else 0,
    )  # fmt: skip


def _kept(position: Mapping[int, Any], sampling: Sampling) -> tuple[int, ...]:
    """The tokens that were left to sample from: the others have no probability. Raises `UnfitAnswer` when some were not seen."""
    logprobs = {token: found.logprob for token, found in position.items() if found.logprob != -math.inf}
    if (missing := 1.0 - math.fsum(map(math.exp, logprobs.values()))) > MISSING_MASS:
        raise UnfitAnswer(
            f"top_k={sampling.top_k} and top_p={sampling.top_p} left more tokens to sample from than the {len(logprobs)} likeliest that "
            f"are recorded ({missing:.3f} of the probability is missing): lower top_k (at most {MAX_LABELS}), or serve in float32"
        )
    return tuple(sorted(logprobs))


def plain_params(**chosen: Any) -> SamplingParams:
    """Sampling without any of the usual decorations: no penalties, no minimum, our stop tokens only, one final output."""
    neutral: dict[str, Any] = {
        "n": 1, "temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "seed": None, "min_tokens": 0,
        "presence_penalty": 0.0, "frequency_penalty": 0.0, "repetition_penalty": 1.0, "stop": None, "stop_token_ids": [],
        "ignore_eos": True, "detokenize": False, "output_kind": RequestOutputKind.FINAL_ONLY,
    }  # fmt: skip
    return SamplingParams(**{**neutral, **chosen})


def normalised(scores: Sequence[float]) -> tuple[float, ...]:
    """Probabilities proportional to exp(score)."""
    best = max(scores)
    weights = [math.exp(s - best) for s in scores]
    return tuple(w / sum(weights) for w in weights)
