"""What the server does with each request, on the fake engine."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from tests.policy_samples import adapter_config

from selfplay.agent import Message, Sampling
from selfplay.environment import JuryQuestion
from selfplay.errors import SyncError
from selfplay.policy.fake import FakeChat, FakeEngine
from selfplay.policy.service import PolicyService
from selfplay.policy.settings import PolicyServerConfig
from selfplay.policy.turnover import Refusal
from selfplay.types import PolicyVersion, Span
from selfplay.wire.messages import (
    PROTOCOL,
    AbortInstall,
    BeginInstall,
    BucketHeader,
    Choose,
    CommitInstall,
    EndEpisode,
    Generate,
    MakeCurrent,
    PolicyHello,
    Probe,
    Retire,
    Stats,
)

HEADER = BucketHeader(
    transport="shm", address="x", offset=0, num_bytes=4, crc32=0, dtype="float32", layout=(("x", (1,), 0),),
    adapter_config=adapter_config(),
)  # fmt: skip


class Bench:
    """A service on a fake engine."""

    def __init__(self, engine: FakeEngine, **settings: Any) -> None:
        config = PolicyServerConfig(address="", runtime_dir="", model="m", **{"max_model_len": 256, **settings})
        self.engine = engine
        self.service = PolicyService(config, engine, asyncio.run(engine.start()), FakeChat(), None)

    async def install(self, version: str, *, current: bool = True) -> None:
        v = PolicyVersion.parse(version)
        await self.service.handle(BeginInstall(request=1, version=v, header=HEADER))
        await self.service.handle(CommitInstall(request=1, version=v, timeout_s=1))
        if current:
            await self.service.handle(MakeCurrent(request=1, version=v))

    async def ask(self, agent: str = "pro", pin: Any = "turn", **changes: Any) -> Any:
        message: dict[str, Any] = {
            "request": 1, "episode_id": "0.0", "agent": agent, "pin": pin, "messages": (Message("user", "hi"),),
            "known_messages": 0, "prefix_ids": (), "sampling": Sampling(max_tokens=16), "timeout_s": 5.0,
        }  # fmt: skip
        reply: Any = await self.service.handle(Generate(**{**message, **changes}))
        return reply.answer

    async def stats(self) -> dict[str, float]:
        reply: Any = await self.service.handle(Stats(request=1))
        values: dict[str, float] = reply.values
        return values


def play(work: Callable[[Bench], Awaitable[None]], engine: FakeEngine | None = None, **settings: Any) -> None:
    bench = Bench(engine or FakeEngine(), **settings)
    asyncio.run(work(bench))  # type: ignore[arg-type]


def test_an_answer_carries_its_tokens_and_its_version() -> None:
    async def work(b: Bench) -> None:
        await b.install("pro@3")
        answer = await b.ask()
        assert answer.prompt_ids == tuple(FakeChat().encode("<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"))
        assert answer.sampled_ids[-1] == 257
        assert answer.text == FakeChat().decode(answer.sampled_ids)
        assert answer.spans == (Span(3, 0, 9),)
        assert (answer.stop_reason, len(answer.logprobs), answer.fork) == ("stop", 9, False)
        base = await b.ask("base")
        assert base.spans == (Span(0, 0, 9),)
        assert base.text != answer.text
        follow = await b.ask(
            messages=(Message("user", "hi"), Message("assistant", answer.text), Message("user", "go")),
            known_messages=2, prefix_ids=answer.prompt_ids + answer.sampled_ids,
        )  # fmt: skip
        assert FakeChat().decode(follow.prompt_ids) == "\nuser\ngo\nassistant\n"
        assert (await b.stats())["requests"] == 3

    play(work)


def test_budget_and_context() -> None:
    async def work(b: Bench) -> None:
        prompt = len(FakeChat().encode("<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"))
        answer = await b.ask("base", sampling=Sampling(max_tokens=4))
        assert (answer.stop_reason, len(answer.sampled_ids)) == ("length", 4)
        roomy = "x" * (256 - prompt - 3 + 2)
        answer = await b.ask("base", messages=(Message("user", roomy),))
        assert (answer.stop_reason, len(answer.sampled_ids)) == ("context", 3)
        answer = await b.ask("base", messages=(Message("user", roomy + "yyy"),))
        assert (answer.stop_reason, answer.sampled_ids, answer.spans, answer.text) == ("context", (), (), "")
        assert len(answer.prompt_ids) == 256
        assert (await b.stats())["no_room"] == 1

    play(work)


def test_one_version_per_episode_or_the_newest_per_turn() -> None:
    async def work(b: Bench) -> None:
        await b.install("pro@0")
        assert (await b.ask(pin="episode")).spans[0].version == 0
        await b.install("pro@1")
        await b.service.handle(Retire(request=1, version=PolicyVersion("pro", 0)))
        assert (await b.ask(pin="episode")).spans[0].version == 0
        assert (await b.ask(pin="turn")).spans[0].version == 1
        assert (await b.ask(pin="episode", episode_id="1.0")).spans[0].version == 1
        assert len(b.engine.installed) == 2
        await b.service.handle(EndEpisode(request=1, episode_id="0.0"))
        assert {n.partition("#")[0] for n in b.engine.installed} == {"pro@1"}

    play(work)


def test_a_version_is_dropped_only_after_its_last_request() -> None:
    async def work(b: Bench) -> None:
        await b.install("pro@0")
        flying = asyncio.create_task(b.ask())
        await asyncio.sleep(0.01)
        await b.install("pro@1")
        await b.service.handle(Retire(request=1, version=PolicyVersion("pro", 0)))
        assert len(b.engine.installed) == 2
        assert (await b.ask()).spans[0].version == 1
        assert (await flying).spans[0].version == 0
        assert {n.partition("#")[0] for n in b.engine.installed} == {"pro@1"}
        assert b.engine.failure() is None

    play(work, FakeEngine(tokens_per_s=200))


def test_a_waiting_request_keeps_its_version_too() -> None:
    """One slot: the request for pro@0 waits behind con; retiring pro@0 meanwhile must not pull it away."""

    async def work(b: Bench) -> None:
        for v in ("con@0", "pro@0", "pro@1"):
            await b.install(v, current=v != "pro@1")
        busy = asyncio.create_task(b.ask("con"))
        await asyncio.sleep(0.01)
        waiting = asyncio.create_task(b.ask("pro"))
        await asyncio.sleep(0.01)
        assert (await b.stats())["requests_waiting"] == 1
        await b.service.handle(MakeCurrent(request=1, version=PolicyVersion("pro", 1)))
        await b.service.handle(Retire(request=1, version=PolicyVersion("pro", 0)))
        assert (await waiting).spans[0].version == 0
        await busy
        assert b.engine.max_live == 1
        assert b.engine.failure() is None

    play(work, FakeEngine(tokens_per_s=200), max_live_adapters=1)


@pytest.mark.parametrize("slots", [1, 2])
def test_more_agents_than_slots_are_all_served(slots: int) -> None:
    async def work(b: Bench) -> None:
        agents = [f"agent{i}" for i in range(5)]
        for agent in agents:
            await b.install(f"{agent}@0")
        answers = await asyncio.gather(*(b.ask(a, episode_id=f"{i}.0") for i in range(8) for a in agents))
        assert len(answers) == 40
        assert b.engine.max_live == slots

    play(work, FakeEngine(tokens_per_s=2000), max_live_adapters=slots)


def test_a_cancelled_request_frees_everything() -> None:
    async def work(b: Bench) -> None:
        await b.install("pro@0")
        tasks = [asyncio.create_task(b.ask()) for _ in range(5)]
        await asyncio.sleep(0.02)
        assert len(b.engine.running) == 5
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        assert b.engine.running == {}
        stats = await b.stats()
        assert (stats["adapters_live"], stats["versions_in_use"]) == (0, 0)

    play(work, FakeEngine(tokens_per_s=20))


def test_a_failed_install_leaves_the_old_version_serving() -> None:
    class Deaf(FakeEngine):
        async def commit_install(self, name: str, timeout_s: float) -> dict[str, float]:
            if name.startswith("pro@1"):
                raise SyncError("crc32 00000001, sent as 00000002")
            return await super().commit_install(name, timeout_s)

    async def work(b: Bench) -> None:
        await b.install("pro@0")
        with pytest.raises(Refusal, match="crc32") as e:
            await b.install("pro@1")
        assert e.value.kind == "bad_request"
        assert b.engine.staged == {}
        assert (await b.ask()).spans[0].version == 0
        with pytest.raises(Refusal, match="cannot become current"):
            await b.service.handle(MakeCurrent(request=1, version=PolicyVersion("pro", 1)))
        await b.service.handle(BeginInstall(request=1, version=PolicyVersion("pro", 1), header=HEADER))
        await b.service.handle(AbortInstall(request=1, version=PolicyVersion("pro", 1)))
        await b.service.handle(AbortInstall(request=1, version=PolicyVersion("pro", 1)))
        assert (await b.stats())["versions_staging"] == 0

    play(work, Deaf())


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"sampling": Sampling(temperature=float("nan"))}, "temperature"),
        ({"sampling": Sampling(temperature=-1.0)}, "temperature"),
        ({"sampling": Sampling(top_p=0.0)}, "top_p"),
        ({"sampling": Sampling(max_tokens=0)}, "max_tokens"),
        ({"prefix_ids": (1, 9999), "known_messages": 2}, "outside 0..257"),
        ({"agent": "nobody"}, "unknown agent 'nobody'"),
        ({"pin": 5}, "pro@5 cannot be asked"),
        ({"messages": ()}, "at least one message"),
    ],
)
def test_bad_requests_are_refused_before_the_engine(changes: dict[str, Any], words: str) -> None:
    async def work(b: Bench) -> None:
        await b.install("pro@0")
        with pytest.raises(Refusal, match=words) as e:
            await b.ask(**changes)
        assert e.value.kind == "bad_request"
        assert (await b.stats())["versions_in_use"] == 0

    play(work)


def test_hello_probe_and_choose() -> None:
    async def work(b: Bench) -> None:
        info: Any = await b.service.handle(PolicyHello(request=7, protocol=PROTOCOL))
        assert (info.request, info.engine, info.stop_ids, len(info.probe_ids)) == (7, "fake, none, none", (257,), 48)
        with pytest.raises(Refusal, match=f"speaks protocol {PROTOCOL}, the peer 99"):
            await b.service.handle(PolicyHello(request=1, protocol=99))
        await b.install("pro@0", current=False)
        probed: Any = await b.service.handle(Probe(request=1, version=PolicyVersion("pro", 0), ids=info.probe_ids))
        assert len(probed.logprobs) == 47
        with pytest.raises(Refusal, match="pro@1 is not installed; installed are pro@0"):
            await b.service.handle(Probe(request=1, version=PolicyVersion("pro", 1), ids=info.probe_ids))
        with pytest.raises(Refusal, match="a probe has 2 to"):
            await b.service.handle(Probe(request=1, version=None, ids=(1,)))
        question = JuryQuestion(system="", prompt="Who?", lead="It is ", labels=("A", "B", "tie"))
        chosen: Any = await b.service.handle(
            Choose(request=1, agent="base", pin="turn", question=question, timeout_s=1)
        )
        assert set(chosen.probabilities) == {"A", "B", "tie"}
        assert sum(chosen.probabilities.values()) == pytest.approx(1)

    play(work)
