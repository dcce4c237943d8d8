"""Continuous batching of the transformers engine: what is sampled from, and rows that join and leave."""

from __future__ import annotations

import asyncio
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from selfplay.agent import Sampling
from selfplay.models import resolve_model, tiny
from selfplay.policy.decoding import Batch, Row, pick, processed_logprobs
from selfplay.policy.routed_lora import install_routing
from selfplay.policy.settings import PolicyServerConfig
from selfplay.policy.transformers_engine import TransformersEngine


def probabilities(sampling: Sampling) -> list[float]:
    """Of a distribution that is .5 .25 .15 .1 at temperature 1."""
    logits = torch.tensor([[0.5, 0.25, 0.15, 0.1]]).log() + 3.0
    return [float(p) for p in processed_logprobs(logits, [sampling]).exp()[0]]


@pytest.mark.parametrize(
    ("sampling", "expected"),
    [
        (Sampling(), [0.5, 0.25, 0.15, 0.1]),
        (Sampling(top_k=2), [2 / 3, 1 / 3, 0, 0]),
        (Sampling(top_k=9), [0.5, 0.25, 0.15, 0.1]),
        (Sampling(top_p=0.5), [1, 0, 0, 0]),
        (Sampling(top_p=0.6), [2 / 3, 1 / 3, 0, 0]),
        (Sampling(top_k=3, top_p=0.8), [2 / 3, 1 / 3, 0, 0]),
        (Sampling(temperature=0.5), [0.25 / 0.345, 0.0625 / 0.345, 0.0225 / 0.345, 0.01 / 0.345]),
        (Sampling(temperature=0.0, top_k=1), [0.5, 0.25, 0.15, 0.1]),
    ],
)
def test_what_is_sampled_from(sampling: Sampling, expected: list[float]) -> None:
    assert probabilities(sampling) == pytest.approx(expected, abs=1e-6)


def row(request: str, ids: list[int], num: int, **sampling: Any) -> Row:
    chosen = Sampling(max_tokens=num, **{"temperature": 0.0, **sampling})
    return Row(request=request, ids=ids, sampling=chosen, stop_ids=frozenset(), adapter=None)


def test_the_most_likely_token_at_temperature_zero_and_frequencies_otherwise() -> None:
    logprobs = torch.tensor([0.1, 0.7, 0.2]).log()
    shared = torch.Generator().manual_seed(0)
    assert set(pick(logprobs, [row("x", [], 1)] * 8, shared).tolist()) == {1}
    tokens = pick(logprobs, [row("x", [], 1, temperature=1.0)] * 4000, shared)
    shares = [float((tokens == i).float().mean()) for i in range(3)]
    assert shares == pytest.approx([0.1, 0.7, 0.2], abs=4 * math.sqrt(0.25 / 4000))


def tiny_batch(folder: Path, **options: Any) -> Batch:
    from transformers import AutoModelForCausalLM

    tiny.write(folder)
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    bank = install_routing(model, ("q_proj",))
    generator = torch.Generator().manual_seed(0)
    for name in ("pro", "con"):
        pairs = {n: (torch.randn(2, 64, generator=generator), torch.randn(64, 2, generator=generator)) for n in QUERIES}
        bank.adapters[name] = pairs
    return Batch(model, bank, generator, **options)


QUERIES = tuple(f"model.layers.{i}.self_attn.q_proj" for i in range(2))


def run_out(batch: Batch) -> list[Row]:
    left = []
    while batch.rows:
        left += batch.step()
    return left


def alone(batch: Batch, one: Row) -> Row:
    again = Row(request="alone", ids=one.ids, sampling=one.sampling, stop_ids=one.stop_ids, adapter=one.adapter)
    if one.sampling.seed is not None:
        again.generator = torch.Generator().manual_seed(one.sampling.seed)
    batch.join([again])
    run_out(batch)
    return again


@pytest.mark.parametrize("prompt_tokens", [0, 10_000])
def test_rows_that_join_late_get_the_tokens_they_would_have_got_alone(tmp_path: Path, prompt_tokens: int) -> None:
    batch = tiny_batch(tmp_path, prompt_tokens=prompt_tokens)
    first = [row("a", list(range(40, 70)), 20), row("b", [65], 3)]
    late = [row("c", list(range(90, 95)), 12), row("d", list(range(40, 65)), 9)]
    batch.join(first)
    left = []
    for step in range(30):
        if step in (2, 5):
            batch.join([late[step // 5]])
        left += batch.step() if batch.rows else []
    assert {r.request for r in left} == {"a", "b", "c", "d"}
    for r in (*first, *late):
        fresh = tiny_batch(tmp_path)
        assert r.sampled == alone(fresh, r).sampled, r.request
        assert r.logprobs == pytest.approx(alone(fresh, r).logprobs, abs=1e-4)


def test_samples_of_one_prompt_share_rows_until_they_part(tmp_path: Path) -> None:
    """Forty requests of three kinds: three prompts are computed, and each gets what it would have got alone."""
    batch = tiny_batch(tmp_path, prompt_tokens=10_000)
    kinds: list[tuple[list[int], str | None]] = [([65, 66, 67], "pro"), ([65, 66, 67], "con"), ([65, 66, 67, 68], None)]
    rows = []
    for i in range(40):
        ids, adapter = kinds[i % 3]
        one = row(f"r{i}", ids, 4, temperature=0.3 if i % 2 else 0.0, seed=i)
        one.adapter, one.generator = adapter, torch.Generator().manual_seed(i)
        rows.append(one)
    batch.join(rows)
    assert (batch.num_computed_rows, batch.prompts.num_computed) == (3, 3 + 3 + 4)
    widths = []
    while batch.rows:
        batch.step()
        widths.append(batch.num_computed_rows)
    assert 3 <= widths[0] < 40
    fresh = tiny_batch(tmp_path)
    for one in rows:
        other = alone(fresh, one)
        assert (one.sampled, one.finish) == (other.sampled, "length"), one.request
        assert one.logprobs == pytest.approx(other.logprobs, abs=1e-4)


def test_a_prompt_goes_on_from_one_that_begins_alike_and_never_from_another_adapters(tmp_path: Path) -> None:
    batch = tiny_batch(tmp_path, prompt_tokens=60)
    batch.prompt("pro", tuple(range(40, 60)))
    batch.prompt("pro", (*range(40, 55), 1, 2))
    assert batch.prompts.num_computed == 20 + 2
    batch.prompt("con", tuple(range(40, 60)))
    assert batch.prompts.num_computed == 42
    batch.prompt("con", tuple(range(40, 60)))
    assert batch.prompts.num_computed == 42
    batch.prompt("con", tuple(range(100, 120)))
    assert batch.prompts.num_tokens <= 60
    swapped, batch._bank.adapters["con"] = batch._bank.adapters["con"], batch._bank.adapters["pro"]
    batch.prompt("con", tuple(range(100, 120)))
    assert batch.prompts.num_computed == 82, "the same name with other tensors computes anew"
    batch.prompts.forget(swapped)


def test_continuations_are_scored_beside_each_other_as_alone(tmp_path: Path) -> None:
    """Answers of one to four tokens after one context, against one whole forward pass each."""
    batch = tiny_batch(tmp_path, prompt_tokens=1000)
    context, answers = (70, 71, 72, 73), [[5], [6, 7], [5, 8, 9, 10], [6, 7, 11]]
    for adapter in ("pro", None):
        found = batch.continuations(adapter, context, answers)
        for answer, logprob in zip(answers, found, strict=True):
            ids = torch.tensor([[*context, *answer]])
            batch._bank.route([adapter])
            with torch.no_grad():
                logs = torch.log_softmax(batch._model(input_ids=ids).logits[0, :-1].float(), -1)
            alone = float(logs.gather(1, ids[0, 1:, None])[len(context) - 1 :].sum())
            assert logprob == pytest.approx(alone, abs=1e-4)
    assert batch.continuations("pro", context, [[5], [9]])[0] == pytest.approx(
        batch.continuations("pro", context, [[5, 1], [5]])[1]
    )


def test_the_engine_computes_logits_of_a_bfloat16_model_in_float32(tmp_path: Path) -> None:
    """Rounded to bfloat16, logits between 32 and 64 would be multiples of 0.25: a policy that moves in jumps of six percent."""
    ids = [504, 1343, 655, 253, 1251]

    async def run() -> None:
        folder = str(resolve_model("smollm2-135m").path)
        engine = TransformersEngine(
            PolicyServerConfig(address="", runtime_dir=str(tmp_path), model=folder, dtype="bfloat16")
        )
        await engine.start()
        try:
            found = torch.tensor(await engine.logprobs("r", ids, None))
            embedding = engine._model.get_input_embeddings().weight
            with torch.inference_mode():
                hidden = engine._model.base_model(input_ids=torch.tensor([ids])).last_hidden_state[0, :-1]
        finally:
            await engine.close()
        assert hidden.dtype == embedding.dtype == torch.bfloat16
        rounded, exact = hidden @ embedding.t(), hidden.double() @ embedding.double().t()
        plain, wanted = (torch.log_softmax(of.double(), -1)[range(4), ids[1:]].float() for of in (rounded, exact))
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-3)
        assert float((plain - wanted).abs().max()) > 0.01, "nothing was gained"

    asyncio.run(run())
