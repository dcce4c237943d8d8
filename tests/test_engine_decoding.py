"""Continuous batching of the transformers engine: what is sampled from, and rows that join and leave."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from selfplay.agent import Sampling
from selfplay.models import tiny
from selfplay.policy.decoding import Batch, Row, pick, processed_logprobs
from selfplay.policy.routed_lora import install_routing


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
    logprobs = torch.tensor([[0.1, 0.7, 0.2]]).log().repeat(4000, 1)
    shared = torch.Generator().manual_seed(0)
    assert set(pick(logprobs[:8], [row("x", [], 1)] * 8, shared).tolist()) == {1}
    tokens = pick(logprobs, [row("x", [], 1, temperature=1.0)] * 4000, shared)
    shares = [float((tokens == i).float().mean()) for i in range(3)]
    assert shares == pytest.approx([0.1, 0.7, 0.2], abs=4 * math.sqrt(0.25 / 4000))


def test_rows_that_join_late_get_the_tokens_they_would_have_got_alone(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    tiny.write(tmp_path)
    model: Any = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    bank = install_routing(model, ("q_proj",))

    def alone(ids: list[int], num: int) -> list[int]:
        batch = Batch(model, bank, torch.Generator())
        batch.join([one := row("alone", ids, num)])
        while batch.rows:
            batch.step()
        return one.sampled

    batch = Batch(model, bank, torch.Generator())
    first = [row("a", list(range(40, 70)), 20), row("b", [65], 3)]
    late = [row("c", list(range(90, 95)), 12), row("d", list(range(30, 120)), 9)]
    batch.join(first)
    left = []
    for step in range(30):
        if step in (2, 5):
            batch.join([late[step // 5]])
        left += batch.step() if batch.rows else []
    assert {r.request for r in left} == {"a", "b", "c", "d"}
    for r in (*first, *late):
        assert r.sampled == alone(list(r.ids), r.sampling.max_tokens), r.request
