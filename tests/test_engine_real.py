"""Both real engines, through the real server process, against transformers and peft.

The model folder asks for sampling habits of its own (top-k 1, a repetition penalty): none of them may show.
"""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest
from safetensors.numpy import load_file, save_file
from tests.policy_samples import Reference, adapter_config, random_adapter
from tests.policy_served import RefusedError, Served, follow, served

from selfplay.agent import Message, Sampling
from selfplay.environment import JuryQuestion
from selfplay.models import tiny
from selfplay.store.adapters import AdapterStore
from selfplay.sync import pack, save_adapter
from selfplay.types import PolicyVersion
from selfplay.wire.messages import BeginInstall, Cancel, Choose, CommitInstall, EndEpisode, Generate

pytestmark = pytest.mark.engine

SLOTS = 2
NAMES = ("alpha", "beta", "gamma", "delta")
STORY = "a long story, please"
CLOSE = 1e-3
"""|Δlogprob| in float32 between an engine and the reference."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("model")
    tiny.write(folder)
    weights = load_file(folder / "model.safetensors")
    weights["lm_head.weight"][tiny.IM_END] = 0  # it may end a turn by chance, never as the most likely token
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    habits = {"top_k": 1, "temperature": 0.1, "repetition_penalty": 1.7, "top_p": 0.3, "eos_token_id": [65, 66]}
    path = folder / "generation_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "do_sample": True, **habits}))
    return str(folder)


@pytest.fixture(scope="module")
def adapters(model: str) -> dict[str, dict[str, Any]]:
    return {name: random_adapter(model, seed) for seed, name in enumerate(NAMES)}


@pytest.fixture(scope="module")
def reference(model: str, adapters: dict[str, dict[str, Any]], tmp_path_factory: pytest.TempPathFactory) -> Reference:
    return Reference(model, adapters, tmp_path_factory.mktemp("reference"))


@pytest.fixture(scope="module", params=["vllm", "transformers"])
def server(request: pytest.FixtureRequest, model: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    place = tmp_path_factory.mktemp("server")
    with served(
        place, engine=request.param, model=model, dtype="float32", max_live_adapters=SLOTS, max_installed=8
    ) as s:
        yield s


async def long_story(server: Served, agent: str, times: int = 1) -> tuple[str, Any]:
    """A prompt, and ``times`` · `Served.long` tokens that ``agent`` says to it when nothing disturbs it."""
    answer = await server.ask(agent, STORY, num=times * server.long)
    assert len(answer.sampled_ids) == times * server.long
    return STORY, answer


def close(found: Any, expected: Any) -> bool:
    return len(found) == len(expected) and all(abs(a - b) < CLOSE for a, b in zip(found, expected, strict=True))


def test_a_mixed_batch_equals_transformers_and_peft(
    server: Served, adapters: dict[str, dict[str, Any]], reference: Reference
) -> None:
    """Base, alpha and beta in one batch, base rows before, between and after them."""

    async def play() -> list[tuple[str, Any]]:
        for name in ("alpha", "beta"):
            await server.renew(name, adapters[name])
        who = ["base", "alpha", "base", "beta", "beta", "base", "alpha", "base"]
        answers = await asyncio.gather(*(server.ask(a, f"word {i}" * (i + 1)) for i, a in enumerate(who)))
        return list(zip(who, answers, strict=True))

    for agent, answer in server.run(play()):
        ids, logprobs = reference.greedy(answer.prompt_ids, None if agent == "base" else agent, 12)
        assert answer.sampled_ids == tuple(ids), agent
        assert close(answer.logprobs, logprobs), agent
        assert answer.stop_reason == ("stop" if ids[-1] == tiny.IM_END else "length")


def test_probe_equals_teacher_forcing(
    server: Served, adapters: dict[str, dict[str, Any]], reference: Reference
) -> None:
    number = server.run(server.renew("alpha", adapters["alpha"]))
    ids = server.info.probe_ids
    assert close(server.run(server.probe(f"alpha@{number}", ids)), reference.forced(ids, "alpha"))
    assert close(server.run(server.probe(None, ids)), reference.forced(ids, None))


def test_a_question_is_answered_by_the_mass_of_its_labels(server: Served, reference: Reference) -> None:
    question = JuryQuestion(system="", prompt="Which?", lead="It is ", labels=("A", "B", "no"))
    reply = server.run(server.call(Choose, agent="base", pin="turn", question=question, timeout_s=30.0))
    from selfplay.policy.chat import HfChat
    from selfplay.policy.rendering import Renderer

    asked = Renderer(HfChat(server.config.model)).question(question)
    scores = [sum(reference.forced([*asked.ids, *x], None)[len(asked.ids) - 1 :]) for x in asked.labels]
    total = sum(math.exp(s) for s in scores)
    assert close([reply.probabilities[x] for x in question.labels], [math.exp(s) / total for s in scores])
    single = JuryQuestion(system="", prompt="Which?", lead="It is ", labels=("A", "B"))
    reply = server.run(server.call(Choose, agent="base", pin="turn", question=single, timeout_s=30.0))
    pair = [math.exp(s) for s in scores[:2]]
    assert close([reply.probabilities["A"], reply.probabilities["B"]], [p / sum(pair) for p in pair])


def test_logprobs_are_of_the_tempered_distribution_and_no_folder_default_applies(
    server: Served, reference: Reference
) -> None:
    """At .6 every logprob is that of logits / .6: a top-k of 1 would say 0, a penalty would move repeated tokens."""
    sampling = Sampling(temperature=0.6, max_tokens=48, seed=5)
    answer = server.run(server.ask("base", sampling=sampling))
    whole = answer.prompt_ids + answer.sampled_ids
    expected = reference.forced(whole, None, temperature=0.6)[len(answer.prompt_ids) - 1 :]
    assert close(answer.logprobs, expected)
    assert len(answer.sampled_ids) > 8, "65 and 66 do not stop it"
    assert min(answer.logprobs) < -0.5
    again = server.run(server.ask("base", sampling=sampling))
    assert again.sampled_ids == answer.sampled_ids, "a seed repeats"


def test_the_stop_token_is_among_the_sampled_ids(server: Served) -> None:
    """Sampled until the model happens to say <|im_end|>; the next turn's delta then does not repeat it."""
    (end,) = [i for i in server.info.stop_ids if i == tiny.IM_END]

    async def play() -> Any:
        for seed in range(40):
            answer = await server.ask("base", sampling=Sampling(temperature=1.5, max_tokens=200, seed=seed))
            if answer.stop_reason == "stop":
                return answer, await server.ask("base", **follow(answer, "hello", "again"))
        raise AssertionError("never stopped")

    answer, after = server.run(play())
    assert answer.sampled_ids[-1] == end
    assert answer.sampled_ids.count(end) == 1
    assert not after.fork
    assert after.prompt_ids[0] != end
    assert len(answer.logprobs) == len(answer.sampled_ids)


def test_a_new_version_beside_a_long_generation_changes_none_of_its_tokens(
    server: Served, adapters: dict[str, dict[str, Any]]
) -> None:
    async def play() -> tuple[Any, Any, list[Any]]:
        for name in ("alpha", "beta"):
            await server.renew(name, adapters[name])
        text, alone = await long_story(server, "beta", 2)
        long = asyncio.create_task(server.ask("beta", text, num=2 * server.long))
        others = []
        for name in ("gamma", "delta"):
            number = await server.renew("alpha", adapters[name])
            answer = await server.ask("alpha")
            others.append((number, name, answer))
        assert not long.done(), "it was still running: otherwise this shows nothing"
        return alone, await long, others

    alone, beside, others = server.run(play())
    assert beside.sampled_ids == alone.sampled_ids
    assert close(beside.logprobs, alone.logprobs)
    assert [o[2].spans[0].version for o in others] == [o[0] for o in others]


def test_a_request_in_flight_ends_on_its_version_and_the_next_begins_on_the_new_one(
    server: Served, adapters: dict[str, dict[str, Any]], reference: Reference
) -> None:
    async def play() -> tuple[int, Any, Any]:
        old = await server.renew("alpha", adapters["alpha"])
        text, alone = await long_story(server, "alpha")
        new = await server.stage("alpha", adapters["beta"])
        flying = asyncio.create_task(server.ask("alpha", text, num=server.long))
        await server.steps()
        await server.take_over("alpha", new)
        after = await server.ask("alpha", text)
        assert not flying.done()
        whole = await flying
        assert whole.sampled_ids == alone.sampled_ids
        return old, whole, after

    old, flying, after = server.run(play())
    assert flying.spans[0].version == old
    assert flying.sampled_ids[:12] == tuple(reference.greedy(flying.prompt_ids, "alpha", 12)[0])
    forced = reference.forced(flying.prompt_ids + flying.sampled_ids, "alpha")[len(flying.prompt_ids) - 1 :]
    assert close(flying.logprobs, forced), "all of them are of the old version"
    assert after.spans[0].version == old + 1
    assert after.sampled_ids == tuple(reference.greedy(after.prompt_ids, "beta", 12)[0])


def test_no_cache_of_an_old_version_serves_a_new_one(
    server: Served, adapters: dict[str, dict[str, Any]], reference: Reference
) -> None:
    """The same long prompt before and after the change: each answer is its own version's, to the first token."""
    text = "the same words " * 20
    for tensors in ("alpha", "beta", "alpha"):
        server.run(server.renew("alpha", adapters[tensors]))
        for _ in range(2):
            answer = server.run(server.ask("alpha", text))
            ids, logprobs = reference.greedy(answer.prompt_ids, tensors, 12)
            assert (answer.sampled_ids, close(answer.logprobs, logprobs)) == (tuple(ids), True)


def test_a_version_retired_in_flight_is_gone_afterwards(server: Served, adapters: dict[str, dict[str, Any]]) -> None:
    async def play() -> tuple[int, Any]:
        old = await server.renew("alpha", adapters["alpha"])
        text, _ = await long_story(server, "alpha")
        new = await server.stage("alpha", adapters["beta"])
        flying = asyncio.create_task(server.ask("alpha", text, num=server.long))
        await server.steps()
        await server.take_over("alpha", new)
        assert (await server.stats())["versions_retired"] == 1
        answer = await flying
        assert (await server.stats())["versions_retired"] == 0
        return old, answer

    old, answer = server.run(play())
    assert answer.spans[0].version == old
    with pytest.raises(RefusedError, match=f"alpha@{old} cannot be asked"):
        server.run(server.ask("alpha", pin=old))


def test_an_episode_keeps_its_version(server: Served, adapters: dict[str, dict[str, Any]]) -> None:
    async def play() -> list[int]:
        old = await server.renew("alpha", adapters["alpha"])
        versions = [(await server.ask("alpha", pin="episode", episode_id="9.0")).spans[0].version]
        await server.renew("alpha", adapters["beta"])
        versions += [(await server.ask("alpha", pin="episode", episode_id="9.0")).spans[0].version]
        versions += [(await server.ask("alpha", pin="turn", episode_id="9.0")).spans[0].version]
        server.caller.post(lambda request: EndEpisode(request=request, episode_id="9.0"))
        while (await server.stats())["versions_retired"]:
            await asyncio.sleep(0.01)
        return [v - old for v in versions]

    assert server.run(play()) == [0, 0, 1]


def spoiled(tensors: dict[str, Any], how: str) -> dict[str, Any]:
    first = sorted(tensors)[0]
    if how == "key":
        return {(k.removeprefix("base_model.") if k == first else k): v for k, v in tensors.items()}
    if how == "shape":
        return {k: (v[:, :-1].contiguous() if k == first else v) for k, v in tensors.items()}
    return tensors


@pytest.mark.parametrize(
    ("how", "changes", "words"),
    [
        ("rank", {"adapter_config": adapter_config(rank=64)}, "rank 64 is outside"),
        ("rank", {"adapter_config": adapter_config(rank=4)}, "expected"),
        ("key", {}, "not a LoRA matrix"),
        ("shape", {}, "has the shape"),
    ],
)
def test_a_wrong_adapter_is_refused_and_the_old_version_serves(
    server: Served, adapters: dict[str, dict[str, Any]], how: str, changes: dict[str, Any], words: str
) -> None:
    async def play() -> None:
        number = await server.renew("alpha", adapters["alpha"])
        before = await server.ask("alpha")
        with pytest.raises(RefusedError, match=words):
            await server.publish(f"alpha@{number + 1}", spoiled(adapters["beta"], how), **changes)
        after = await server.ask("alpha")
        assert (after.sampled_ids, after.spans) == (before.sampled_ids, before.spans)
        stats = await server.stats()
        assert (stats["versions_staging"], stats["versions_retired"]) == (0, 0)
        await server.renew("alpha", adapters["beta"])

    server.run(play())


def test_an_adapter_that_never_arrives_times_out_and_blocks_nobody(
    server: Served, adapters: dict[str, dict[str, Any]]
) -> None:
    async def play() -> None:
        number = await server.renew("alpha", adapters["alpha"])
        bucket = pack(
            adapters["beta"], dtype="float32", transport="shm", address=str(server.runtime.file("never")),
            adapter_config=adapter_config(),
        )  # fmt: skip
        version = PolicyVersion("alpha", number + 1)
        await server.call(BeginInstall, version=version, header=bucket.header)
        commit = asyncio.create_task(server.call(CommitInstall, version=version, timeout_s=0.5))
        assert (await server.ask("alpha")).spans[0].version == number
        with pytest.raises(RefusedError, match="did not arrive"):
            await commit

    server.run(play())


def test_a_folder_on_disk_serves_as_the_same_adapter(
    server: Served, adapters: dict[str, dict[str, Any]], tmp_path: Path, reference: Reference
) -> None:
    """As at the start of a run, on resume, and for frozen opponents."""
    number = server.newest["gamma"] = server.newest.get("gamma", -1) + 1
    version = PolicyVersion("gamma", number)
    store = AdapterStore(tmp_path)
    store.publish(version, lambda folder: save_adapter(folder, adapters["gamma"], adapter_config()), parent=None)
    header = store.bucket_header(version)
    with pytest.raises(RefusedError, match="crc32"):
        server.run(server.install(f"gamma@{number}", msgspec.structs.replace(header, crc32=1)))
    server.run(server.install(f"gamma@{number}", header))
    answer = server.run(server.ask("gamma"))
    assert answer.sampled_ids == tuple(reference.greedy(answer.prompt_ids, "gamma", 12)[0])
    memory = server.run(server.renew("gamma", adapters["gamma"]))
    again = server.run(server.ask("gamma"))
    assert (again.sampled_ids, again.logprobs) == (answer.sampled_ids, answer.logprobs), "bit for bit"
    assert memory == number + 1


def test_more_agents_than_slots_are_served_fairly(
    server: Served, adapters: dict[str, dict[str, Any]], reference: Reference
) -> None:
    async def play() -> list[tuple[str, Any]]:
        for name in NAMES:
            await server.renew(name, adapters[name])
        who = [NAMES[i % 4] for i in range(24)]
        answers = await asyncio.gather(*(server.ask(a, f"number {i}") for i, a in enumerate(who)))
        return list(zip(who, answers, strict=True))

    for name, answer in server.run(play()):
        assert answer.sampled_ids == tuple(reference.greedy(answer.prompt_ids, name, 12)[0])


def test_cancelling_frees_slot_and_version(server: Served, adapters: dict[str, dict[str, Any]]) -> None:
    async def play() -> None:
        await server.renew("alpha", adapters["alpha"])
        fields = {
            "episode_id": "0.0", "agent": "alpha", "pin": "turn", "messages": (Message("user", STORY),),
            "known_messages": 0, "prefix_ids": (), "sampling": Sampling(temperature=0.0, max_tokens=900), "timeout_s": 60.0,
        }  # fmt: skip
        calls = [
            asyncio.create_task(
                server.caller.call(
                    lambda request: Generate(request=request, **fields), timeout_s=60.0,
                    cancel=lambda request, target: Cancel(request=request, target=target),
                )
            )
            for _ in range(8)
        ]  # fmt: skip
        async with asyncio.timeout(60):
            while (await server.stats())["adapters_live"] != 1:
                await asyncio.sleep(0.01)
        for call in calls:
            call.cancel()
        assert all(isinstance(end, BaseException) for end in await asyncio.gather(*calls, return_exceptions=True))
        async with asyncio.timeout(10):
            while (await server.stats())["versions_in_use"]:
                await asyncio.sleep(0.01)
        assert (await server.stats())["adapters_live"] == 0

    server.run(play())


def test_a_request_that_takes_too_long_is_refused_and_withdrawn(server: Served) -> None:
    text, _ = server.run(long_story(server, "base"))  # greedy: it does not happen to end early
    with pytest.raises(RefusedError, match=r"timeout: not answered within 0\.01 s"):
        server.run(server.ask("base", text, num=server.long, timeout_s=0.01))


def test_listeners_are_loopback_only(server: Served) -> None:
    found = {
        c.laddr.ip
        for p in server.processes()
        for c in p.net_connections("inet")
        if c.status == psutil.CONN_LISTEN
    }  # fmt: skip
    assert found <= {"127.0.0.1", "::1"}


def test_what_runs_is_said(server: Served) -> None:
    assert server.info.engine.startswith(server.config.engine) and "float32, cpu" in server.info.engine  # noqa: PT018
    log = server.child.log.read_text("utf-8")
    assert f"engine {server.config.engine}" in log
    assert ("use selfplay's CPU kernel in place of vLLM's" in log) == (server.config.engine == "vllm")
    assert msgspec.structs.asdict(server.info)["max_live_adapters"] == SLOTS
