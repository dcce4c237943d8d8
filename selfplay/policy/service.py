"""What a policy server does with each request, apart from sockets and processes.

In: decoded `ToPolicy` messages. Out: one `FromPolicy` reply each (none for `EndEpisode`). A request that cannot be served
raises `Refusal`, which the server turns into `Refused`; an `EngineError` means that the engine itself failed.
"""

from __future__ import annotations

import itertools
import math
import time
from collections import Counter
from collections.abc import Sequence
from typing import Literal

import msgspec

from selfplay.agent import Answer, Sampling
from selfplay.errors import SyncError
from selfplay.policy.adapter_check import AdapterRules
from selfplay.policy.engine import Engine, EngineInfo, Sampled, UnfitAnswer
from selfplay.policy.flights import AnswerParts, Flight, Flights
from selfplay.policy.rendering import ChatError, ChatTokenizer, Renderer, fit_budget
from selfplay.policy.settings import PolicyServerConfig
from selfplay.policy.slots import SlotGate
from selfplay.policy.turnover import Refusal, Turnover
from selfplay.policy.versions import Installed, VersionRefused, VersionRegistry
from selfplay.types import BASE, PolicyVersion
from selfplay.wire.codec import clean_text
from selfplay.wire.messages import (
    PROTOCOL,
    AbortInstall,
    BeginInstall,
    Choose,
    Chosen,
    CommitInstall,
    Done,
    EndEpisode,
    FromPolicy,
    Generate,
    Generated,
    Hold,
    JoinWeights,
    MakeCurrent,
    PolicyHello,
    PolicyInfo,
    Probe,
    ProbeResult,
    Release,
    Retire,
    Score,
    Scored,
    Stats,
    StatsResult,
    ToPolicy,
)

PROBE_TEXT = (
    "The two sides took turns. The first one named a number between one and nine, the second one answered, and after "
    "some time somebody who had listened to both of them said, quite calmly, which of the two had made the better case "
    "and why the other one might still win tomorrow."
)
NUM_PROBE_IDS = 48
COUNTERS = (
    "requests", "prompt_tokens", "sampled_tokens", "questions", "forks", "no_room", "installs", "drops", "leases_expired",
    "bad_frames", "lost_replies", "refused", "swapped", "resumed",
)  # fmt: skip


class PolicyService:
    """One engine and its versions. All methods run in one event loop."""

    def __init__(
        self,
        config: PolicyServerConfig,
        engine: Engine,
        info: EngineInfo,
        chat: ChatTokenizer,
        rules: AdapterRules | None,
    ) -> None:
        """``rules``: what adapters must look like; None when the engine takes anything (the fake one)."""
        self._config, self._engine, self._info, self._chat = config, engine, info, chat
        self._renderer = Renderer(chat)
        self._versions = VersionRegistry(config.installed_limit, config.lease_s)
        self._gate = SlotGate(config.max_live_adapters)
        self._flights = Flights()
        self._serial = itertools.count(1)
        self._counts: Counter[str] = Counter()
        self._turnover = Turnover(engine, self._versions, self._flights, rules, self._counts)
        self._probe_ids = tuple(self._renderer.encode_plain(PROBE_TEXT * 4)[:NUM_PROBE_IDS])

    async def handle(self, message: ToPolicy) -> FromPolicy | None:
        """Serve one request. Raises `Refusal` or `EngineError`."""
        try:
            return await self._dispatch(message)
        except VersionRefused as e:
            raise Refusal(e.kind, str(e)) from e
        except (ChatError, SyncError, UnfitAnswer) as e:
            raise Refusal("bad_request", str(e)) from e

    async def _dispatch(self, message: ToPolicy) -> FromPolicy | None:
        match message:
            case Generate():
                return await self._generate(message)
            case Choose():
                return await self._choose(message)
            case Score():
                return await self._score(message)
            case Probe():
                return await self._probe(message)
            case EndEpisode():
                self._versions.end_episode(message.episode_id)
                await self._turnover.drop_unused()
                return None
            case PolicyHello():
                return self._hello(message)
            case Stats():
                return StatsResult(request=message.request, values=self.stats())
            case (
                BeginInstall() | CommitInstall() | AbortInstall() | MakeCurrent() | Hold() | Release() | Retire()
                | JoinWeights()
            ):  # fmt: skip
                return Done(request=message.request, values=await self._turnover.handle(message))
        raise Refusal("bad_request", f"{type(message).__name__} is not a request of its own")

    # ── playing ───────────────────────────────────────────────────────────────────────────────────

    async def _generate(self, m: Generate) -> Generated:
        check_sampling(m.sampling)
        self._check_ids(m.prefix_ids)
        self._versions.check_agent(m.agent)
        delta = self._renderer.render(m.messages, m.known_messages, m.prefix_ids)
        context = delta.ids if delta.fork else (*m.prefix_ids, *delta.ids)
        budget = fit_budget(len(context), m.sampling.max_tokens, self._config.max_model_len)
        self._counts["forks"] += delta.fork
        if budget < 1:
            self._counts["no_room"] += 1
            answer = Answer(text="", prompt_ids=delta.ids, fork=delta.fork, stop_reason="context")
            return Generated(request=m.request, answer=answer)
        parts, finish = await self._answer(m, context, msgspec.structs.replace(m.sampling, max_tokens=budget))
        self._counts.update(requests=1, prompt_tokens=len(delta.ids), sampled_tokens=len(parts.ids))
        stop = "context" if finish == "length" and budget < m.sampling.max_tokens else finish
        answer = Answer(
            text=clean_text(self._chat.decode(parts.ids)), prompt_ids=delta.ids, fork=delta.fork,
            sampled_ids=parts.ids, logprobs=_finite(parts.logprobs), spans=parts.spans, kept=parts.kept, stop_reason=stop,
        )  # fmt: skip
        return Generated(request=m.request, answer=answer)

    async def _answer(
        self, m: Generate, context: tuple[int, ...], sampling: Sampling
    ) -> tuple[AnswerParts, Literal["stop", "length", "abort"]]:
        """Sample the whole answer; more than one part when a new version made it begin again from its tokens."""
        parts = AnswerParts()
        while True:
            await self._flights.wait_for_turn(m.agent)
            entry = self._versions.acquire(m.agent, m.pin, m.episode_id, time.monotonic())
            flight = Flight(agent=m.agent, pin=m.pin, entry=entry, request=self._name("g"))
            self._flights.begin(flight)
            try:
                part = await self._sample(flight, (*context, *parts.ids), parts.sampling(sampling))
            finally:
                self._versions.release(entry, m.episode_id, time.monotonic())
                self._flights.end(flight)
                await self._turnover.drop_unused()
            parts.add(part.ids, part.logprobs, flight.spans(len(part.ids)), part.kept)
            if part.finish != "abort" or not flight.resumes:
                return parts, part.finish
            self._counts["resumed"] += 1

    async def _sample(self, flight: Flight, context: tuple[int, ...], sampling: Sampling) -> Sampled:
        name = flight.entry.name if flight.entry else None
        async with self._gate.hold(name):
            if flight.resumes:  # aborted while it waited for its slot
                return Sampled(ids=(), logprobs=(), finish="abort")
            flight.with_engine = True
            return await self._engine.generate(flight.request, context, sampling, self._chat.stop_ids, name)

    async def _choose(self, m: Choose) -> Chosen:
        question = self._renderer.question(m.question)
        longest = len(question.ids) + max(map(len, question.labels))
        if longest > self._config.max_model_len:
            raise Refusal(
                "bad_request", f"the question has {longest} tokens; the model takes {self._config.max_model_len}"
            )
        await self._flights.wait_for_turn(m.agent)
        entry = self._versions.acquire(m.agent, m.pin, "", time.monotonic())
        name = entry.name if entry else None
        # A question is answered at once: it is waited for, never aborted or swapped.
        flight = Flight(agent=m.agent, pin="episode", entry=entry, request=self._name("c"))
        self._flights.begin(flight)
        try:
            async with self._gate.hold(name):
                found = await self._engine.choose(flight.request, question.ids, question.labels, name)
        finally:
            self._versions.release(entry, "", time.monotonic())
            self._flights.end(flight)
            await self._turnover.drop_unused()
        self._counts["questions"] += 1
        return Chosen(request=m.request, probabilities=dict(zip(m.question.labels, found, strict=True)))

    async def _score(self, m: Score) -> Scored:
        context = self._renderer.render(m.messages, 0, ()).ids
        answers = [self._renderer.encode_plain(clean_text(answer)) for answer in m.answers]
        ended = [(*answer, stop) for answer in answers for stop in self._chat.stop_ids]
        longest = len(context) + max(map(len, ended))
        if longest >= self._config.max_model_len:
            raise Refusal(
                "bad_request", f"an answer ends at token {longest}; the model takes {self._config.max_model_len}"
            )
        entry = self._scored_version(m)
        name = entry.name if entry else None
        try:
            async with self._gate.hold(name):
                found = await self._engine.continuations(self._name("a"), context, ended, name)
        finally:
            self._versions.release(entry, "", time.monotonic())
            await self._turnover.drop_unused()
        self._counts["questions"] += 1
        num_ends = len(self._chat.stop_ids)
        return Scored(
            request=m.request, logprobs=tuple(_either(found[i : i + num_ends]) for i in range(0, len(found), num_ends))
        )

    def _scored_version(self, m: Score) -> Installed | None:
        """The version to score with, counted as in use; it is held for no episode."""
        if m.agent == BASE or not isinstance(m.pin, int):
            return self._versions.acquire(m.agent, m.pin, "", time.monotonic())
        entry = self._versions.exact(PolicyVersion(m.agent, m.pin))
        entry.uses += 1
        return entry

    async def _probe(self, m: Probe) -> ProbeResult:
        self._check_ids(m.ids)
        if not 2 <= len(m.ids) < self._config.max_model_len:
            raise Refusal("bad_request", f"a probe has 2 to {self._config.max_model_len - 1} tokens, not {len(m.ids)}")
        entry = self._versions.exact(m.version) if m.version else None
        if entry:
            entry.uses += 1
        name = entry.name if entry else None
        try:
            async with self._gate.hold(name):
                logprobs = await self._engine.logprobs(self._name("p"), m.ids, name)
        finally:
            self._versions.release(entry, "", time.monotonic())
            await self._turnover.drop_unused()
        return ProbeResult(request=m.request, logprobs=logprobs)

    # ── the rest ──────────────────────────────────────────────────────────────────────────────────

    def count(self, what: str) -> None:
        """Count one more of ``what`` that happened outside the service."""
        self._counts[what] += 1

    def stats(self) -> dict[str, float]:
        """Counters since the start, and what is live now."""
        live = {"adapters_live": self._gate.num_live, "requests_waiting": self._gate.num_waiting}
        return {
            k: float(v)
            for k, v in {**{n: self._counts[n] for n in COUNTERS}, **live, **self._versions.counts()}.items()
        }

    def _hello(self, m: PolicyHello) -> PolicyInfo:
        if m.protocol != PROTOCOL:
            raise Refusal("bad_request", f"this policy server speaks protocol {PROTOCOL}, the peer {m.protocol}")
        return PolicyInfo(
            request=m.request, protocol=PROTOCOL, engine=str(self._info), model=self._config.model,
            max_model_len=self._config.max_model_len, max_live_adapters=self._config.max_live_adapters,
            stop_ids=self._chat.stop_ids, probe_ids=self._probe_ids,
        )  # fmt: skip

    def _check_ids(self, ids: tuple[int, ...]) -> None:
        if ids and not 0 <= min(ids) <= max(ids) < self._chat.vocab_size:
            raise Refusal("bad_request", f"token ids {min(ids)}..{max(ids)} are outside 0..{self._chat.vocab_size - 1}")

    def _name(self, kind: str) -> str:
        return f"{kind}{next(self._serial)}"


def check_sampling(s: Sampling) -> None:
    """Raise `Refusal` for values that have no meaning or that an engine would die of."""
    sound = math.isfinite(s.temperature) and s.temperature >= 0 and 0 < s.top_p <= 1 and s.top_k >= 0
    if not sound or s.max_tokens < 1 or (s.seed is not None and not 0 <= s.seed < 2**63):
        raise Refusal(
            "bad_request", f"sampling {s} is not possible: temperature ≥ 0, 0 < top_p ≤ 1, top_k ≥ 0, max_tokens ≥ 1"
        )


def _finite(logprobs: tuple[float, ...]) -> tuple[float, ...]:
    """Rounding can lift a logprob a hair above 0. Values that are not finite pass: whoever stores the episode rejects it."""
    return tuple(min(x, 0.0) if math.isfinite(x) else x for x in logprobs)


def _either(logprobs: Sequence[float]) -> float:
    """Log-probability that one of several things happens that exclude each other."""
    best = max(logprobs)
    return best + math.log(math.fsum(math.exp(x - best) for x in logprobs)) if math.isfinite(best) else best
