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
from selfplay.wire.messages import Hold, Release

pytestmark = pytest.mark.engine

CLOSE = 1e-3
SLOTS = 4
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
    with served(
        place, engine=request.param, model=model, dtype="float32", max_live_adapters=SLOTS, max_installed=10
    ) as s:
        yield s


async def begin(server: Served, agent: str, tensors: dict[str, Any], **changes: Any) -> tuple[int, asyncio.Task[Any]]:
    """A long greedy answer by a version of ``agent`` that has sampled some tokens already; the version is the second newest.

    The newest is staged, so that nothing but one message is between here and its taking over.
    """
    number = await server.renew(agent, tensors["alpha"])
    await server.stage(agent, tensors["beta"])
    flying = asyncio.create_task(server.ask(agent, STORY, num=server.long, **changes))
    await server.steps()
    assert not flying.done()
    return number, flying


def differences(found: Any, expected: Any) -> list[float]:
    return [abs(a - b) for a, b in zip(found, expected, strict=True)]


def test_swapped_in_mid_answer_and_the_record_says_at_which_token(
    server: Served, adapters: dict[str, dict[str, Any]], reference: Reference
) -> None:
    async def play() -> tuple[int, dict[str, float], Any, Any]:
        old, flying = await begin(server, "alpha", adapters)
        values = await server.take_over("alpha", old + 1, "swap")
        answer = await flying
        return old, values, answer, await server.ask("alpha", STORY)

    old, values, answer, after = server.run(play())
    assert (values["swapped"], values["resumed"], values["left"]) == (1, 0, 0)
    first, second = answer.spans
    assert (first.version, second.version) == (old, old + 1)
    assert 0 < first.end == second.start < second.end == len(answer.sampled_ids) == server.long
    ids, before = answer.prompt_ids + answer.sampled_ids, len(answer.prompt_ids)
    gaps = differences(answer.logprobs, reference.forced(ids, "alpha")[before - 1 :])
    assert max(gaps[: first.end]) < CLOSE, "to the last token before the swap they are the old version's"
    assert gaps[first.end] > CLOSE, "and from the very next one they are not"
    assert after.sampled_ids == tuple(reference.greedy(after.prompt_ids, "beta", 12)[0]), "no cache of the mixture"
    assert [s.version for s in after.spans] == [old + 1]


def test_a_second_swap_of_the_same_answer(server: Served, adapters: dict[str, dict[str, Any]]) -> None:
    async def play() -> tuple[int, Any, dict[str, float]]:
        old, flying = await begin(server, "alpha", adapters)
        await server.stage("alpha", adapters["alpha"])
        await server.take_over("alpha", old + 1, "swap")
        await server.steps()
        await server.take_over("alpha", old + 2, "swap")
        return old, await flying, await server.stats()

    old, answer, stats = server.run(play())
    assert [s.version for s in answer.spans] == [old, old + 1, old + 2]
    assert (stats["versions_retired"], stats["versions_in_use"]) == (0, 0), "all of it is dropped when the answer ends"


def test_aborted_and_gone_on_from_its_tokens_under_the_new_version(
    server: Served, adapters: dict[str, dict[str, Any]], reference: Reference
) -> None:
    async def play() -> tuple[int, dict[str, float], Any]:
        old, flying = await begin(server, "alpha", adapters)
        values = await server.take_over("alpha", old + 1, "resume")
        return old, values, await flying

    old, values, answer = server.run(play())
    assert (values["swapped"], values["resumed"], values["left"]) == (0, 1, 0)
    first, second = answer.spans
    assert [(s.version) for s in answer.spans] == [old, old + 1]
    assert (len(answer.sampled_ids), answer.stop_reason) == (server.long, "length"), "one budget for both parts"
    ids, before = answer.prompt_ids + answer.sampled_ids, len(answer.prompt_ids)
    for span, adapter in ((first, "alpha"), (second, "beta")):
        expected = reference.forced(ids, adapter)[before - 1 :][span.start : span.end]
        assert max(differences(answer.logprobs[span.start : span.end], expected)) < CLOSE
    start = answer.prompt_ids + answer.sampled_ids[: second.start]
    assert answer.sampled_ids[second.start :][:12] == tuple(reference.greedy(start, "beta", 12)[0])


def test_pinned_answers_are_never_swapped_or_aborted(server: Served, adapters: dict[str, dict[str, Any]]) -> None:
    async def play() -> None:
        for flights, episode in (("swap", "7.0"), ("resume", "8.0")):
            old, flying = await begin(server, "alpha", adapters, pin="episode", episode_id=episode)
            beside = asyncio.create_task(server.ask("alpha", STORY, num=server.long))
            await server.steps()
            values = await server.take_over("alpha", old + 1, flights)
            assert values["left"] == (1 if flights == "swap" else 0), (
                "an unpinned answer on the same version is left too"
            )
            assert [s.version for s in (await flying).spans] == [old]
            await beside

    server.run(play())


def test_a_hold_keeps_one_agent_back_and_nobody_else(server: Served, adapters: dict[str, dict[str, Any]]) -> None:
    async def play() -> None:
        await server.renew("beta", adapters["beta"])
        old, flying = await begin(server, "alpha", adapters)
        hold = asyncio.create_task(server.call(Hold, agents=("alpha",), abort=False, timeout_s=60.0, lease_s=60.0))
        await server.heard()
        late = asyncio.create_task(server.ask("alpha"))
        assert (await server.ask("beta")).spans, "beta goes on"
        values = (await hold).values
        assert values["under_way"] == 1
        assert (await server.stats())["adapters_live"] == 0, "a hold is answered when nothing is under way any more"
        await server.take_over("alpha", old + 1)
        assert not late.done()
        await server.call(Release)
        assert [s.version for s in (await late).spans] == [old + 1]
        assert [s.version for s in (await flying).spans] == [old]

    server.run(play())


def test_everybody_held_at_once_goes_on_from_the_same_token(
    server: Served, adapters: dict[str, dict[str, Any]], reference: Reference
) -> None:
    async def play() -> tuple[int, Any, Any]:
        number, flying = await begin(server, "alpha", adapters)
        base = asyncio.create_task(server.ask("base", STORY, num=server.long))
        await server.steps()
        await server.call(Hold, agents=(), abort=True, timeout_s=30.0, lease_s=60.0)
        assert not flying.done() and not base.done()  # noqa: PT018
        assert (await server.stats())["adapters_live"] == 0
        await server.call(Release)
        ended = await flying, await base
        await server.take_over("alpha", number + 1)
        return number, *ended

    number, answer, base = server.run(play())
    assert [s.version for s in answer.spans] == [number], "two parts, one version, one span"
    assert answer.sampled_ids[:100] == tuple(reference.greedy(answer.prompt_ids, "alpha", 100)[0])
    assert len(answer.sampled_ids) == len(base.sampled_ids) == server.long


def test_a_hold_ends_by_itself_and_one_that_waits_too_long_is_refused(
    server: Served, adapters: dict[str, dict[str, Any]]
) -> None:
    async def play() -> None:
        number, flying = await begin(server, "alpha", adapters)
        with pytest.raises(RefusedError, match=r"1 answers were still under way after 0\.01 s"):
            await server.call(Hold, agents=("alpha",), abort=False, timeout_s=0.01, lease_s=60.0)
        assert (await server.ask("alpha")).spans, "a refused hold holds nobody"
        await flying
        await server.call(Hold, agents=("alpha",), abort=False, timeout_s=5.0, lease_s=0.2)
        assert (await server.ask("alpha")).spans, "nobody released it; its lease ran out"
        await server.take_over("alpha", number + 1)

    server.run(play())


def test_one_adapter_more_than_slots_changes_no_running_answer(
    server: Served, adapters: dict[str, dict[str, Any]]
) -> None:
    """Every slot decodes greedily for an agent of its own while a further one is loaded, made current and asked."""
    agents = ("alpha", "beta", "a", "b")
    assert len(agents) == SLOTS

    async def play() -> None:
        for i, agent in enumerate(agents):
            await server.renew(agent, adapters["alpha" if i % 2 else "beta"])
        alone = await asyncio.gather(*(server.ask(agent, STORY, num=server.long) for agent in agents))
        flying = [asyncio.create_task(server.ask(agent, STORY, num=server.long)) for agent in agents]
        await server.steps()
        await server.renew("c", adapters["alpha"])
        waiting = asyncio.create_task(server.ask("c"))
        await server.heard()
        assert not any(task.done() for task in flying), "all were still running: otherwise this shows nothing"
        for before, after in zip(alone, await asyncio.gather(*flying), strict=True):
            assert (after.sampled_ids, after.spans) == (before.sampled_ids, before.spans)
            assert max(differences(after.logprobs, before.logprobs)) < CLOSE
        assert (await waiting).sampled_ids == (await server.ask("c")).sampled_ids

    server.run(play())


def test_it_says_alpha_and_after_the_update_beta(server: Served, model: str, words: dict[str, dict[str, Any]]) -> None:
    """Two adapters with words of their own: the first answer after the update is the new word, while another agent's
    long answer is the same as undisturbed, and the old version's answer under way is still the old word's."""

    async def play() -> None:
        await server.renew("b", random_adapter(model, 5))
        alone = await server.ask("b", STORY, num=server.long)
        await server.renew("a", words["ALPHA"])
        for _ in range(2):
            assert (await server.ask("a", "Who are you?", num=5)).text == "ALPHA"
        number = await server.stage("a", words["BETA"])
        long = asyncio.create_task(server.ask("b", STORY, num=server.long))
        flying = asyncio.create_task(server.ask("a", STORY, num=server.long))
        await server.steps()
        await server.take_over("a", number)
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


CUTS: tuple[dict[str, Any], ...] = ({}, {"top_k": 5}, {"top_k": 9, "top_p": 0.8})
HEAT = 0.8


def test_what_top_k_and_top_p_left_is_recorded_and_the_trainer_repeats_it(
    server: Served, model: str, adapters: dict[str, dict[str, Any]], reference: Reference, tmp_path: Path
) -> None:
    """Every answer of one batch by its own rule, under two versions; also where one takes over in mid-answer."""

    def asked(who: str, i: int, num: int) -> Any:
        return server.ask(who, f"say {i}", sampling=Sampling(temperature=HEAT, max_tokens=num, seed=i, **CUTS[i % 3]))

    async def play() -> list[Any]:
        await server.renew("alpha", adapters["alpha"])
        await server.stage("alpha", adapters["beta"])
        answers = await asyncio.gather(*(asked(who, i, 16) for i in range(6) for who in ("alpha", "base")))
        flying = asyncio.create_task(asked("alpha", 2, server.long))
        await server.steps()
        await server.take_over("alpha", server.newest["alpha"], "resume")
        return [*answers, await flying]

    *answers, resumed = server.run(play())
    for i, answer in enumerate(answers):
        check_kept(answer, reference, CUTS[i // 2 % 3], ["base" if i % 2 else "alpha"])
    check_kept(resumed, reference, CUTS[2], ["alpha", "beta"])
    check_replayed([a for a in answers[1::2] if a.kept], model, tmp_path)


def check_kept(answer: Any, reference: Reference, cut: dict[str, Any], adapters: list[str]) -> None:
    """Sets and log-probabilities are those of the distribution that was sampled from, in the part of each adapter."""
    assert bool(answer.kept) == bool(cut)
    ids, before = answer.prompt_ids + answer.sampled_ids, len(answer.prompt_ids)
    parts = [(s.start, s.end) for s in answer.spans] or [(0, len(answer.sampled_ids))]
    for adapter, part in zip(adapters, parts, strict=True):
        rows = reference.logprobs(ids, None if adapter == "base" else adapter, HEAT)[before - 1 :]
        for at in range(*part):
            left = list(answer.kept[at] if cut else range(len(rows[at])))
            wanted = list(left_by(rows[at], cut["top_k"], cut.get("top_p", 1.0)) if cut else left)
            # Of two that are equally likely either may be the last one left.
            assert (rows[at][left].sort().values - rows[at][wanted].sort().values).abs().max() < CLOSE
            expected = rows[at][answer.sampled_ids[at]] - rows[at][left].logsumexp(0)
            assert abs(float(expected) - answer.logprobs[at]) < CLOSE


def check_replayed(answers: list[Any], model: str, place: Path) -> None:
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
    found = trainer.policy(row, 1 / HEAT).head.logprobs[row.picks]
    torch.testing.assert_close(found.detach(), row.rollout_logprobs, atol=CLOSE, rtol=0)
    plain = pack_row([msgspec.structs.replace(s, kept=()) for s in segments], torch.device("cpu"))
    found = trainer.policy(plain, 1 / HEAT).head.logprobs[plain.picks]
    assert float((found.detach() - plain.rollout_logprobs).max()) < -0.05


def test_as_many_equally_likely_tokens_as_there_are_are_left(server: Served, reference: Reference) -> None:
    """Where the k-th likeliest token has a twin, k + 1 tokens are sampled from, and k + 1 are recorded."""
    first = server.run(server.ask("base", num=1))
    row = reference.logprobs(first.prompt_ids, None)[-1]
    ranked = row.argsort(descending=True)[:64].tolist()
    k = next(k for k in range(1, 64) if row[ranked[k - 1]] == row[ranked[k]])
    answer = server.run(server.ask("base", sampling=Sampling(top_k=k, max_tokens=1, seed=1)))
    assert sorted(ranked[: k + 1]) == list(answer.kept[0])


def test_after_all_that_the_base_is_what_it_was(server: Served, reference: Reference) -> None:
    """Dozens of adapters have come, been swapped and gone: nothing of them stays in the weights that all share."""
    stats = server.run(server.stats())
    assert stats["installs"] >= 10
    assert stats["drops"] >= 8
    ids = server.info.probe_ids
    assert max(differences(server.run(server.probe(None, ids)), reference.forced(ids, None))) < CLOSE
