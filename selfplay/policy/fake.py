"""An engine and a tokenizer without a model: deterministic, of settable speed, for tests and for looking at the server.

The tokens of an answer are decided by adapter and context alone (or by a function the caller brings), so two runs agree
whatever the concurrency was. Needs no torch.
"""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from types import MappingProxyType

from selfplay.agent import Message, Sampling
from selfplay.errors import SyncError
from selfplay.policy.engine import EngineInfo, Sampled, continue_one_by_one
from selfplay.wire.messages import BucketHeader, JoinWeights

BEGIN, END = "<|im_start|>", "<|im_end|>"
Answerer = Callable[[Sequence[int], "str | None", Sampling], Sequence[int]]
LETTERS = b"abcdefghijklmnopqrstuvwxyz "


class FakeChat:
    """Bytes as tokens, with ChatML turns: ids 0..255, then the two markers."""

    control: Mapping[str, int] = MappingProxyType({BEGIN: 256, END: 257})
    hidden: Collection[str] = (BEGIN, END)
    stop_ids: tuple[int, ...] = (257,)
    vocab_size = 258

    def template(self, messages: Sequence[Message], *, add_generation_prompt: bool) -> str:
        """ChatML."""
        turns = [f"{BEGIN}{m.role}\n{m.content}{END}\n" for m in messages]
        return "".join(turns) + (f"{BEGIN}assistant\n" if add_generation_prompt else "")

    def encode(self, text: str) -> list[int]:
        """One id per byte; the markers one each."""
        ids: list[int] = []
        for i, part in enumerate(text.split(BEGIN)):
            ids += [256] if i else []
            for j, piece in enumerate(part.split(END)):
                ids += [257] if j else []
                ids += piece.encode()
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """The bytes as text, markers left out."""
        return bytes(i for i in ids if i < 256).decode("utf-8", "replace")


def scribble(ids: Sequence[int], adapter: str | None, sampling: Sampling) -> Sequence[int]:
    """A short run of letters decided by context and adapter (its version, not its installation)."""
    who = (adapter or "").partition("#")[0]
    digest = hashlib.blake2b(f"{who}|{sampling.seed}|{list(ids)}".encode(), digest_size=8).digest()
    return [LETTERS[b % len(LETTERS)] for b in digest] + [257]


class FakeEngine:
    """`Engine` without a model.

    ``num_running`` and ``max_live`` (most different adapters at once) are what tests look at.
    """

    def __init__(self, *, tokens_per_s: float = 0.0, answer: Answerer = scribble) -> None:
        self._token_s = 1.0 / tokens_per_s if tokens_per_s else 0.0
        self._answer = answer
        self._aborted: set[str] = set()
        self._failure: str | None = None
        self._progress: dict[str, int] = {}
        self.running: dict[str, str | None] = {}
        self.installed: set[str] = set()
        self.staged: dict[str, BucketHeader] = {}
        self.max_live = 0

    async def start(self) -> EngineInfo:
        return EngineInfo(name="fake", device="none", dtype="none")

    async def close(self) -> None:
        self.installed.clear()

    def failure(self) -> str | None:
        return self._failure

    def die(self, reason: str) -> None:
        """Be dead from now on."""
        self._failure = reason

    async def generate(
        self, request: str, ids: Sequence[int], sampling: Sampling, stop_ids: Sequence[int], adapter: str | None
    ) -> Sampled:
        self._require(adapter)
        wanted = list(self._answer(ids, adapter, sampling))
        stop = next((i + 1 for i, t in enumerate(wanted) if t in stop_ids), None)
        sampled = wanted[: min(stop or len(wanted), sampling.max_tokens)]
        self.running[request] = adapter
        self.max_live = max(self.max_live, len({a for a in self.running.values() if a}))
        try:
            done = await self._take_time(request, len(sampled))
        finally:
            del self.running[request]
            self._progress.pop(request, None)
            self._aborted.discard(request)
        finish = "abort" if done < len(sampled) else "stop" if sampled and sampled[-1] in stop_ids else "length"
        return Sampled(ids=tuple(sampled[:done]), logprobs=(-1.0,) * done, finish=finish)  # type: ignore[arg-type]

    async def _take_time(self, request: str, num_tokens: int) -> int:
        for done in range(num_tokens):
            self._progress[request] = done
            if request in self._aborted:
                return done
            if self._token_s:
                await asyncio.sleep(self._token_s)
        await asyncio.sleep(0)
        return num_tokens

    async def choose(
        self,
        request: str,  # noqa: ARG002
        ids: Sequence[int],
        labels: Sequence[Sequence[int]],
        adapter: str | None,
    ) -> tuple[float, ...]:
        self._require(adapter)
        digest = hashlib.blake2b(f"{adapter}|{list(ids)}".encode(), digest_size=len(labels)).digest()
        total = sum(digest) + len(labels)
        return tuple((b + 1) / total for b in digest)

    async def logprobs(self, request: str, ids: Sequence[int], adapter: str | None) -> tuple[float, ...]:  # noqa: ARG002
        self._require(adapter)
        return tuple(-math.log(2 + (a * 31 + b) % 7) for a, b in itertools.pairwise(ids))

    async def continuations(
        self, request: str, ids: Sequence[int], answers: Sequence[Sequence[int]], adapter: str | None
    ) -> tuple[float, ...]:
        """See `Engine.continuations`."""
        return await continue_one_by_one(self, request, ids, answers, adapter)

    async def abort(self, request: str) -> None:
        if request in self.running:
            self._aborted.add(request)

    async def join_weights(self, message: JoinWeights) -> None:
        pass

    async def begin_install(self, name: str, header: BucketHeader) -> None:
        self.staged[name] = header

    async def commit_install(self, name: str, timeout_s: float) -> dict[str, float]:
        if name not in self.staged:
            raise SyncError(f"{name} did not arrive within {timeout_s:g} s")
        del self.staged[name]
        self.installed.add(name)
        return {"blocked_ms": 0.0}

    async def abort_install(self, name: str) -> None:
        self.staged.pop(name, None)

    async def swap(self, old: str, new: str) -> dict[str, int]:
        """Counts only: the answers of this engine are decided when they begin."""
        self._require(new)
        return {r: self._progress.get(r, 0) for r, name in self.running.items() if name == old}

    async def drop(self, name: str) -> None:
        self.installed.discard(name)

    def _require(self, adapter: str | None) -> None:
        """The server's promise, checked where a real engine would die."""
        if adapter is not None and adapter not in self.installed:
            self.die(f"adapter {adapter} was asked for but is not installed")
            raise SyncError(f"adapter {adapter} is not installed")
