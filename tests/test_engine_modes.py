"""What a new version does to answers under way, on both real engines: swapped, begun again, waited for, left alone."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from safetensors.numpy import load_file, save_file
from tests.policy_samples import Reference, adapter_config, left_by, random_adapter, taught_adapter
from tests.policy_samples import chat as messages
from tests.policy_served import RefusedError, Served, served

from selfplay.agent import Sampling
from selfplay.models import tiny
from selfplay.store.adapters import AdapterStore
from selfplay.sync import save_adapter
from selfplay.types import PolicyVersion, Segment
from selfplay.wire.messages import Hold, MakeCurrent, Release

pytestmark = pytest.mark.engine

LONG = 400
CLOSE = 1e-3
STORY = "a long story, please"
TWINS = list(range(200, 248, 2))
"""Tokens that are always as likely as the one after them, and hardly ever the most likely."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("model")
    tiny.write(folder)
    weights = load_file(folder / "model.safetensors")
    head = weights["lm_head.weight"]
    head[tiny.IM_END] = 0  # never the most likely token: greedy answers are as long as they may be
    head[TWINS] *= 0.6
    head[[t + 1 for t in TWINS]] = head[TWINS]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return str(folder)


@pytest.fixture(scope="module")
def adapters(model: str) -> dict[str, dict[str, Any]]:
    return {name: random_adapter(model, seed) for seed, name in enumerate(("alpha", "beta"))}


@pytest.fixture(scope="module")
def words(model: str) -> dict[str, dict[str, Any]]:
    """Adapters that answer "Who are you?" with a word of their own."""
    from selfplay.policy.chat import HfChat
    from selfplay.policy.rendering import Renderer

    chat = HfChat(model)
    prompt = Renderer(chat).render(messages("Who are you?"), 0, ()).ids
    return {word: taught_adapter(model, prompt, chat.encode(word)) for word in ("ALPHA", "BETA")}


@pytest.fixture(scope="module")
def reference(model: str, adapters: dict[str, dict[str, Any]], tmp_path_factory: pytest.TempPathFactory) -> Reference:
    return Reference(model, adapters, tmp_path_factory.mktemp("reference"))


@pytest.fixture(scope="module", params=["vllm", "transformers"])
def server(request: pytest.FixtureRequest, model: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    place = tmp_path_factory.mktemp("server")
    with served(place, engine=request.param, model=model, dtype="float32", max_live_adapters=4, max_installed=10) as s:
        yield s


async def begin(server: Served, agent: str, tensors: dict[str, Any], **changes: Any) -> tuple[int, asyncio.Task[Any]]:
    """A version of ``agent``, and a long greedy answer by it that has sampled some tokens already."""
    number = await server.renew(agent, tensors)
    flying = asyncio.create_task(server.ask(agent, STORY, num=LONG, **changes))
    await asyncio.sleep(0.15)
    assert not flying.done()
    return number, flying


async def turn_over(server: Served, agent: str, tensors: dict[str, Any], flights: str) -> dict[str, float]:
    """Publish the next version and make it current with ``flights``; what became of the answers under way."""
    number = server.newest[agent] = server.newest[agent] + 1
    await server.publish(f"{agent}@{number}", tensors, current=False)
    done = await server.call(MakeCurrent, version=PolicyVersion(agent, number), flights=flights)
    await server.retire(f"{agent}@{number - 1}")
    values: dict[str, float] = done.values
    return values


def differences(found: Any, expected: Any) -> list[float]:
    return [abs(a - b) for a, b in zip(found, expected, strict=True)]


def test_swapped_in_mid_answer_and_the_record_says_at_which_token(
    server: Served, adapters: dict[str, dict[str, Any]], reference: Reference
) -> None:
    async def play() -> tuple[int, dict[str, float], Any, Any]:
        old, flying = await begin(server, "alpha", adapters["alpha"])
        values = await turn_over(server, "alpha", adapters["beta"], "swap")
        answer = await flying
        return old, values, answer, await server.ask("alpha", STORY)

    old, values, answer, after = server.run(play())
    assert (values["swapped"], values["resumed"], values["left"]) == (1, 0, 0)
    first, second = answer.spans
    assert (first.version, second.version) == (old, old + 1)
    assert 0 < first.end == second.start < second.end == len(answer.sampled_ids) == LONG
    ids, before = answer.prompt_ids + answer.sampled_ids, len(answer.prompt_ids)
    gaps = differences(answer.logprobs, reference.forced(ids, "alpha")[before - 1 :])
    assert max(gaps[: first.end]) < CLOSE, "to the last token before the swap they are the old version's"
    assert gaps[first.end] > CLOSE, "and from the very next one they are not"
    assert after.sampled_ids == tuple(reference.greedy(after.prompt_ids, "beta", 12)[0]), "no cache of the mixture"
    assert [s.version for s in after.spans] == [old + 1]


def test_a_second_swap_of_the_same_answer(server: Served, adapters: dict[str, dict[str, Any]]) -> None:
    async def play() -> tuple[int, Any, dict[str, float]]:
        old, flying = await begin(server, "alpha", adapters["alpha"])
        await turn_over(server, "alpha", adapters["beta"], "swap")
        await asyncio.sleep(0.05)
        await turn_over(server, "alpha", adapters["alpha"], "swap")
        return old, await flying, await server.stats()

    old, answer, stats = server.run(play())
    assert [s.version for s in answer.spans] == [old, old + 1, old + 2]
    assert (stats["versions_retired"], stats["versions_in_use"]) == (0, 0), "all of it is dropped when the answer ends"


def test_aborted_and_gone_on_from_its_tokens_under_the_new_version(
    server: Served, adapters: dict[str, dict[str, Any]], reference: Reference
) -> None:
    async def play() -> tuple[int, dict[str, float], Any]:
        old, flying = await begin(server, "alpha", adapters["alpha"])
        values = await turn_over(server, "alpha", adapters["beta"], "resume")
        return old, values, await flying

    old, values, answer = server.run(play())
    assert (values["swapped"], values["resumed"], values["left"]) == (0, 1, 0)
    first, second = answer.spans
    assert [(s.version) for s in answer.spans] == [old, old + 1]
    assert (len(answer.sampled_ids), answer.stop_reason) == (LONG, "length"), "one budget for both parts"
    ids, before = answer.prompt_ids + answer.sampled_ids, len(answer.prompt_ids)
    for span, adapter in ((first, "alpha"), (second, "beta")):
        expected = reference.forced(ids, adapter)[before - 1 :][span.start : span.end]
        assert max(differences(answer.logprobs[span.start : span.end], expected)) < CLOSE
    start = answer.prompt_ids + answer.sampled_ids[: second.start]
    assert answer.sampled_ids[second.start :][:12] == tuple(reference.greedy(start, "beta", 12)[0])


def test_pinned_answers_are_never_swapped_or_aborted(server: Served, adapters: dict[str, dict[str, Any]]) -> None:
    async def play() -> None:
        for flights, episode in (("swap", "7.0"), ("resume", "8.0")):
            old, flying = await begin(server, "alpha", adapters["alpha"], pin="episode", episode_id=episode)
            beside = asyncio.create_task(server.ask("alpha", STORY, num=LONG))
            await asyncio.sleep(0.05)
            values = await turn_over(server, "alpha", adapters["beta"], flights)
            assert values["left"] == (1 if flights == "swap" else 0), (
                "an unpinned answer on the same version is left too"
            )
            assert [s.version for s in (await flying).spans] == [old]
            await beside

    server.run(play())


def test_a_hold_keeps_one_agent_back_and_nobody_else(server: Served, adapters: dict[str, dict[str, Any]]) -> None:
    async def play() -> None:
        await server.renew("beta", adapters["beta"])
        old, flying = await begin(server, "alpha", adapters["alpha"])
        hold = asyncio.create_task(server.call(Hold, agents=("alpha",), abort=False, timeout_s=60.0, lease_s=60.0))
        await asyncio.sleep(0.05)
        late = asyncio.create_task(server.ask("alpha"))
        assert (await server.ask("beta")).spans, "beta goes on"
        values = (await hold).values
        assert values["under_way"] == 1
        assert (await server.stats())["adapters_live"] == 0, "a hold is answered when nothing is under way any more"
        await turn_over(server, "alpha", adapters["beta"], "finish")
        assert not late.done()
        await server.call(Release)
        assert [s.version for s in (await late).spans] == [old + 1]
        assert [s.version for s in (await flying).spans] == [old]

    server.run(play())


def test_everybody_held_at_once_goes_on_from_the_same_token(
    server: Served, adapters: dict[str, dict[str, Any]], reference: Reference
) -> None:
    async def play() -> tuple[int, Any, Any]:
        number, flying = await begin(server, "alpha", adapters["alpha"])
        base = asyncio.create_task(server.ask("base", STORY, num=LONG))
        await asyncio.sleep(0.05)
        await server.call(Hold, agents=(), abort=True, timeout_s=30.0, lease_s=60.0)
        assert not flying.done() and not base.done()  # noqa: PT018
        assert (await server.stats())["adapters_live"] == 0
        await server.call(Release)
        return number, await flying, await base

    number, answer, base = server.run(play())
    assert [s.version for s in answer.spans] == [number], "two parts, one version, one span"
    assert answer.sampled_ids[:100] == tuple(reference.greedy(answer.prompt_ids, "alpha", 100)[0])
    assert len(answer.sampled_ids) == len(base.sampled_ids) == LONG


def test_a_hold_ends_by_itself_and_one_that_waits_too_long_is_refused(
    server: Served, adapters: dict[str, dict[str, Any]]
) -> None:
    async def play() -> None:
        _, flying = await begin(server, "alpha", adapters["alpha"])
        with pytest.raises(RefusedError, match=r"1 answers were still under way after 0\.01 s"):
            await server.call(Hold, agents=("alpha",), abort=False, timeout_s=0.01, lease_s=60.0)
        assert (await server.ask("alpha")).spans, "a refused hold holds nobody"
        await flying
        await server.call(Hold, agents=("alpha",), abort=False, timeout_s=5.0, lease_s=0.2)
        assert (await server.ask("alpha")).spans, "nobody released it; its lease ran out"

    server.run(play())


def test_it_says_alpha_and_after_the_update_beta(server: Served, model: str, words: dict[str, dict[str, Any]]) -> None:
    """Two adapters with words of their own: the first answer after the update is the new word, while another agent's
    long answer is the same as undisturbed, and the old version's answer under way is still the old word's."""

    async def play() -> None:
        await server.renew("b", random_adapter(model, 5))
        alone = await server.ask("b", STORY, num=LONG)
        await server.renew("a", words["ALPHA"])
        for _ in range(2):
            assert (await server.ask("a", "Who are you?", num=5)).text == "ALPHA"
        long = asyncio.create_task(server.ask("b", STORY, num=LONG))
        flying = asyncio.create_task(server.ask("a", STORY, num=LONG))
        await asyncio.sleep(0.1)
        number = await server.renew("a", words["BETA"])
        after = await server.ask("a", "Who are you?", num=4)
        assert (after.text, [s.version for s in after.spans]) == ("BETA", [number])
        assert not long.done(), "it was still running: otherwise this shows nothing"
        assert [s.version for s in (await flying).spans] == [number - 1]
        beside = await long
        assert beside.sampled_ids == alone.sampled_ids
        assert max(differences(beside.logprobs, alone.logprobs)) < CLOSE

    server.run(play())


def test_a_version_loaded_from_a_folder_needs_the_folder_no_more(
    server: Served, adapters: dict[str, dict[str, Any]], reference: Reference, tmp_path: Path
) -> None:
    store, version = AdapterStore(tmp_path / "adapters"), PolicyVersion("gone", 0)
    store.publish(version, lambda folder: save_adapter(folder, adapters["alpha"], adapter_config()), parent=None)
    server.run(server.install("gone@0", store.bucket_header(version)))
    shutil.rmtree(tmp_path / "adapters")
    for text in ("hello", "again"):
        answer = server.run(server.ask("gone", text))
        assert answer.sampled_ids == tuple(reference.greedy(answer.prompt_ids, "alpha", 12)[0])


@pytest.mark.parametrize(("top_k", "top_p"), [(5, 1.0), (9, 0.8)])
def test_what_top_k_and_top_p_left_is_recorded_and_the_trainer_repeats_it(
    server: Served, model: str, adapters: dict[str, dict[str, Any]], reference: Reference, tmp_path: Path,
    top_k: int, top_p: float,
) -> None:  # fmt: skip
    """In one batch with plain answers and another version; also where a new version takes over in mid-answer."""
    cut = {"temperature": 0.8, "top_k": top_k, "top_p": top_p}

    async def play() -> list[Any]:
        await server.renew("alpha", adapters["alpha"])
        asked = [
            server.ask(who, f"say {i}", sampling=Sampling(max_tokens=24, seed=i, **(cut if i % 3 else {})))
            for i in range(9)
            for who in ("alpha", "base")
        ]
        flying = asyncio.create_task(server.ask("alpha", STORY, sampling=Sampling(max_tokens=LONG, seed=1, **cut)))
        answers = await asyncio.gather(*asked)
        await turn_over(server, "alpha", adapters["beta"], "resume")
        return [*answers, await flying]

    *answers, resumed = server.run(play())
    for i, answer in enumerate(answers):
        if i // 2 % 3 == 0:
            assert not answer.kept
        else:
            check_kept(answer, [(None if i % 2 else "alpha", 0, 24)], reference, cut)
    if len(resumed.spans) == 2:  # it may have ended before
        parts = [(name, s.start, s.end) for name, s in zip(("alpha", "beta"), resumed.spans, strict=True)]
        check_kept(resumed, parts, reference, cut)
    check_replayed([a for a in answers[1::2] if a.kept], model, tmp_path, 1 / cut["temperature"])


def check_kept(
    answer: Any, parts: list[tuple[str | None, int, int]], reference: Reference, cut: dict[str, Any]
) -> None:
    """Sets and log-probabilities are those of the distribution that was sampled from."""
    ids, before = answer.prompt_ids + answer.sampled_ids, len(answer.prompt_ids)
    for adapter, start, end in parts:
        rows = reference.logprobs(ids, adapter, cut["temperature"])[before - 1 :]
        for at in range(start, min(end, len(answer.sampled_ids))):
            left = list(answer.kept[at])
            assert tuple(left) == left_by(rows[at], cut["top_k"], cut["top_p"])
            expected = rows[at][answer.sampled_ids[at]] - rows[at][left].logsumexp(0)
            assert abs(float(expected) - answer.logprobs[at]) < CLOSE


def check_replayed(answers: list[Any], model: str, place: Path, inv_temperature: float) -> None:
    """The trainer has the engine's log-probability of every token, and without the record it has another."""
    import torch

    from selfplay.training.rows import pack_row
    from selfplay.training.service import start_trainer
    from training_site import config, rank_config

    trainer, _ = start_trainer(rank_config(Path(model), place, config()))
    segments = []
    for answer in answers:
        num, zeros = len(answer.sampled_ids), (0,) * len(answer.prompt_ids)
        segments.append(
            Segment(
                episode_id="0.0", agent="pro", seat="pro", ids=answer.prompt_ids + answer.sampled_ids,
                mask=(*zeros, *(1,) * num), logprobs=(*zeros, *answer.logprobs), advantages=(*zeros, *(0.0,) * num),
                versions=(0, 0), kept=answer.kept,
            )
        )  # fmt: skip
    row = pack_row(segments, torch.device("cpu"))
    found = trainer.policy(row, inv_temperature).head.logprobs[row.picks]
    torch.testing.assert_close(found.detach(), row.rollout_logprobs, atol=CLOSE, rtol=0)
    plain = pack_row([msgspec.structs.replace(s, kept=()) for s in segments], torch.device("cpu"))
    found = trainer.policy(plain, inv_temperature).head.logprobs[plain.picks]
    assert float((found.detach() - plain.rollout_logprobs).max()) < -0.05


def test_as_many_equally_likely_tokens_as_there_are_are_left(server: Served, reference: Reference) -> None:
    """Where the k-th likeliest token has a twin, k + 1 tokens are sampled from, and k + 1 are recorded."""
    first = server.run(server.ask("base", num=1))
    row = reference.logprobs(first.prompt_ids, None)[-1]
    ranked = row.argsort(descending=True)[:64].tolist()
    k = next(k for k in range(1, 64) if row[ranked[k - 1]] == row[ranked[k]])
    answer = server.run(server.ask("base", sampling=Sampling(top_k=k, max_tokens=1, seed=1)))
    assert sorted(ranked[: k + 1]) == list(answer.kept[0])
