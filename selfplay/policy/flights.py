"""Answers under way and the holds that keep others from beginning: what a new version meets when it arrives.

    begin ──► under way ──(swap: a mark where the weights changed)──► end
                  └──(resume: aborted, its tokens kept)──► waits for a hold, begins again as the same answer

Pure bookkeeping: no engine, no sockets. One event loop; times are monotonic seconds.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field

import msgspec

from selfplay.agent import Sampling
from selfplay.policy.versions import Installed
from selfplay.types import Span, derive_seed
from selfplay.wire.messages import Pin


@dataclass(eq=False, kw_only=True)
class Flight:
    """One part of an answer: what one engine request samples."""

    agent: str
    pin: Pin
    entry: Installed | None
    """None: the base model."""
    request: str
    marks: list[tuple[int, int]] = field(default_factory=list)
    """(tokens sampled when the weights changed, version from there on), in order."""
    with_engine: bool = False
    """Its request was handed to the engine; until then it waits for a slot."""
    resumes: bool = False
    """It was aborted so that it goes on as another part."""

    def spans(self, num_tokens: int) -> list[Span]:
        """Which version sampled which of this part's tokens; the base model counts as version 0 of itself."""
        marks = [(min(at, num_tokens), version) for at, version in self.marks]
        starts = [(0, self.entry.version.version if self.entry else 0), *marks]
        ends = [at for at, _ in marks] + [num_tokens]
        return [
            Span(version=version, start=start, end=end)
            for (start, version), end in zip(starts, ends, strict=True)
            if end > start
        ]


@dataclass(eq=False)
class AnswerParts:
    """An answer that grows part by part: C tokens so far."""

    ids: tuple[int, ...] = ()
    logprobs: tuple[float, ...] = ()
    spans: tuple[Span, ...] = ()
    kept: tuple[tuple[int, ...], ...] = ()
    """What each token was sampled among, with top-k or top-p; else empty."""
    num_parts: int = 0

    def add(
        self,
        ids: Collection[int],
        logprobs: Collection[float],
        spans: Iterable[Span],
        kept: Collection[tuple[int, ...]] = (),
    ) -> None:
        """Append one part; spans of one version that touch become one."""
        self.kept = (*self.kept, *kept)
        offset = len(self.ids)
        self.ids, self.logprobs = (*self.ids, *ids), (*self.logprobs, *logprobs)
        merged = list(self.spans)
        for span in spans:
            if merged and merged[-1].version == span.version:
                merged[-1] = Span(version=span.version, start=merged[-1].start, end=span.end + offset)
            else:
                merged.append(Span(version=span.version, start=span.start + offset, end=span.end + offset))
        self.spans = tuple(merged)
        self.num_parts += 1

    def sampling(self, sampling: Sampling) -> Sampling:
        """For the next part: what is left of the budget, and a seed of its own so that no noise is used twice."""
        seed = sampling.seed
        if seed is not None and self.num_parts:
            seed = derive_seed(seed, self.num_parts) % 2**31
        return msgspec.structs.replace(sampling, max_tokens=sampling.max_tokens - len(self.ids), seed=seed)


class Flights:
    """Everything under way on one server, and who must wait before beginning."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._under_way: set[Flight] = set()
        self._held: frozenset[str] | None = frozenset()
        """Agents that may not begin; None: nobody may."""
        self._held_until = 0.0
        self._changed = asyncio.Event()
        """Of now; the next change has another one."""

    # ── answers ───────────────────────────────────────────────────────────────────────────────────

    async def wait_for_turn(self, agent: str) -> None:
        """Until no hold keeps ``agent`` from beginning."""
        while self._is_held(agent):
            left_s = self._held_until - self._now()
            try:
                async with asyncio.timeout(max(0.0, left_s)):
                    await self._changed.wait()
            except TimeoutError:
                continue  # the hold was forgotten by whoever asked for it: `_is_held` lets it go

    def begin(self, flight: Flight) -> None:
        self._under_way.add(flight)

    def end(self, flight: Flight) -> None:
        self._under_way.discard(flight)
        self._tell()

    def of(self, agents: Collection[str] | None) -> list[Flight]:
        """Under way for ``agents``; None: for anybody."""
        return [f for f in self._under_way if agents is None or f.agent in agents]

    # ── holds ─────────────────────────────────────────────────────────────────────────────────────

    @property
    def is_holding(self) -> bool:
        return self._held is None or bool(self._held)

    def hold(self, agents: Collection[str], lease_s: float) -> None:
        """Keep ``agents`` (empty: everybody) from beginning until `release`, or for ``lease_s``."""
        self._held = frozenset(agents) or None
        self._held_until = self._now() + lease_s

    async def landed(self, agents: Collection[str] | None) -> None:
        """Until none of ``agents`` is under way."""
        while self.of(agents):
            await self._changed.wait()

    def release(self) -> None:
        """End the hold; harmless without one."""
        self._held = frozenset()
        self._tell()

    def _tell(self) -> None:
        """Whoever waits looks again. Without a task or a lock of its own: it happens after every answer."""
        self._changed.set()
        self._changed = asyncio.Event()

    def _is_held(self, agent: str) -> bool:
        if self.is_holding and self._now() >= self._held_until:
            self._held = frozenset()
        return self._held is None or agent in self._held
