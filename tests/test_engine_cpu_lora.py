"""The corrected CPU adapter kernel against a loop over rows, on layers as vLLM lays them out."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from selfplay.policy import cpu_lora

SLOTS, RANK, WIDTH = 3, 4, 16


class Wrapper:
    """The part of vLLM's punica wrapper that the kernel uses."""

    def __init__(self) -> None:
        self.token_lora_indices = torch.zeros(0, dtype=torch.long)

    def update_metadata(self, slots: list[int]) -> None:
        self.token_lora_indices = torch.tensor(slots)

    def add_lora_linear(self, *args: Any, **kwargs: Any) -> None:
        raise AssertionError("vLLM's own kernel was called")


def layer(wrapper: Wrapper, outs: tuple[int, ...], seed: int, dtype: torch.dtype = torch.float32) -> Any:
    """As `BaseLinearLayerWithLoRA`: per slice A [slots, 1, rank, in] and B [slots, 1, out, rank], with something in it."""
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(dtype)

    def vllms_own(*args: Any) -> None:
        at.own_calls.append(args)

    at = SimpleNamespace(
        output_slices=outs, punica_wrapper=wrapper, n_slices=len(outs), tp_size=1, set_lora=vllms_own, own_calls=[],
        lora_a_stacked=tuple(random(SLOTS, 1, RANK, WIDTH) for _ in outs),
        lora_b_stacked=tuple(random(SLOTS, 1, out, RANK) for out in outs),
    )  # fmt: skip
    return at


def by_rows(y: Tensor, x: Tensor, at: Any, slots: list[int], scale: float) -> Tensor:
    y = y.clone()
    for row, slot in enumerate(slots):
        start = 0
        for a, b, out in zip(at.lora_a_stacked, at.lora_b_stacked, at.output_slices, strict=True):
            if slot >= 0:
                y[row, start : start + out] += scale * (b[slot, 0] @ (a[slot, 0] @ x[row]))
            start += out
    return y


@pytest.mark.parametrize("outs", [(8,), (8, 8), (12, 4, 4)])
@pytest.mark.parametrize(
    "slots",
    [[-1, 0, -1, 1, 2, -1], [0, 0, 0], [2, 2], [-1, -1], [1, -1], [0, 1, 2, 0, 1, 2], [-1]],
    ids=lambda s: ",".join(map(str, s)),
)
def test_each_row_gets_its_own_adapter_and_base_rows_none(outs: tuple[int, ...], slots: list[int]) -> None:
    wrapper = Wrapper()
    at = layer(wrapper, outs, seed=len(outs))
    assert cpu_lora.apply(SimpleNamespace(modules={"q": at})) == 1
    generator = torch.Generator().manual_seed(9)
    x = torch.randn(len(slots), WIDTH, generator=generator)
    y = torch.randn(len(slots), sum(outs), generator=generator)
    expected = by_rows(y, x, at, slots, 0.5)
    wrapper.update_metadata(slots)
    wrapper.add_lora_linear(y, x, at.lora_a_stacked, at.lora_b_stacked, 0.5, outs)
    assert torch.allclose(y, expected, atol=1e-5)


@pytest.mark.parametrize("repeats", [1, 9])
def test_in_bfloat16_few_rows_and_many_are_as_exact_as_rows_by_themselves(repeats: int) -> None:
    """Few rows are computed in float32, `cpu_lora.FEW_ROWS`, and many are not; both within bfloat16's own rounding."""
    slots = [-1, 0, 2] * repeats
    assert (len(slots) > cpu_lora.FEW_ROWS) is (repeats > 1)
    wrapper = Wrapper()
    at = layer(wrapper, (8, 8), seed=6, dtype=torch.bfloat16)
    cpu_lora.apply(SimpleNamespace(modules={"q": at}))
    generator = torch.Generator().manual_seed(9)
    x = torch.randn(len(slots), WIDTH, generator=generator).bfloat16()
    y = torch.randn(len(slots), 16, generator=generator).bfloat16()
    wide = SimpleNamespace(
        lora_a_stacked=[a.float() for a in at.lora_a_stacked], lora_b_stacked=[b.float() for b in at.lora_b_stacked],
        output_slices=(8, 8),
    )  # fmt: skip
    expected = by_rows(y.float(), x.float(), wide, slots, 0.5)
    wrapper.update_metadata(slots)
    wrapper.add_lora_linear(y, x, at.lora_a_stacked, at.lora_b_stacked, 0.5, (8, 8))
    assert torch.allclose(y.float(), expected, rtol=0.02, atol=0.05)


def test_loading_into_a_slot_reaches_the_kernel() -> None:
    """vLLM zeroes and fills its tensors by slot; they are views of the kernel's blocks."""
    wrapper = Wrapper()
    at = layer(wrapper, (8, 8), seed=1)
    cpu_lora.apply(SimpleNamespace(modules={"q": at}))
    new_a, new_b = torch.randn(RANK - 1, WIDTH), torch.randn(8, RANK - 1)
    for i in range(2):
        at.lora_a_stacked[i][1] = 0
        at.lora_b_stacked[i][1] = 0
        at.lora_a_stacked[i][1, 0, : RANK - 1].copy_(new_a)
        at.lora_b_stacked[i][1, 0, :, : RANK - 1].copy_(new_b)
    x = torch.randn(2, WIDTH)
    for slots in ([1, 1], [1, -1]):
        y = torch.zeros(2, 16)
        wrapper.update_metadata(slots)
        wrapper.add_lora_linear(y, x, at.lora_a_stacked, at.lora_b_stacked, 1.0, (8, 8))
        assert torch.allclose(y[0], (new_b @ (new_a @ x[0])).repeat(2), atol=1e-5)
        assert torch.equal(y[1], torch.zeros(16)) is (slots[1] == -1)


@pytest.mark.parametrize("rank", [RANK, RANK - 1])
def test_an_adapter_replaces_all_that_was_in_its_slot_and_nothing_else(rank: int) -> None:
    wrapper = Wrapper()
    at = layer(wrapper, (8, 4), seed=3)
    cpu_lora.apply(SimpleNamespace(modules={"q": at}))
    before = [(a.clone(), b.clone()) for a, b in zip(at.lora_a_stacked, at.lora_b_stacked, strict=True)]
    new_a, new_b = torch.randn(rank, WIDTH), torch.randn(8, rank)
    at.set_lora(1, [new_a, None], [new_b, None])
    assert torch.equal(at.lora_a_stacked[0][1, 0, :rank], new_a)
    assert torch.equal(at.lora_b_stacked[0][1, 0, :, :rank], new_b)
    assert not at.lora_a_stacked[0][1, 0, rank:].any()
    assert not at.lora_b_stacked[0][1, 0, :, rank:].any()
    assert not at.lora_a_stacked[1][1].any()
    assert not at.lora_b_stacked[1][1].any()
    for slot in (0, 2):
        for (a, b), now_a, now_b in zip(before, at.lora_a_stacked, at.lora_b_stacked, strict=True):
            assert torch.equal(now_a[slot], a[slot])
            assert torch.equal(now_b[slot], b[slot])


def test_a_layer_of_one_slice_takes_bare_matrices() -> None:
    at = layer(Wrapper(), (8,), seed=4)
    cpu_lora.apply(SimpleNamespace(modules={"o": at}))
    new_a, new_b = torch.randn(RANK, WIDTH), torch.randn(8, RANK)
    at.set_lora(0, new_a, new_b)
    assert torch.equal(at.lora_a_stacked[0][0, 0], new_a)
    assert torch.equal(at.lora_b_stacked[0][0, 0], new_b)


def test_what_does_not_come_one_pair_per_slice_is_left_to_vllm() -> None:
    at = layer(Wrapper(), (8, 8), seed=5)
    cpu_lora.apply(SimpleNamespace(modules={"q": at}))
    both = (1, [torch.randn(RANK, WIDTH)], [torch.randn(16, RANK)])
    at.set_lora(*both)
    assert at.own_calls == [both]


def test_a_new_batch_forgets_the_mask_of_the_old_one() -> None:
    wrapper = Wrapper()
    at = layer(wrapper, (8,), seed=2)
    cpu_lora.apply(SimpleNamespace(modules={"q": at}))
    x = torch.randn(3, WIDTH)
    for slots in ([0, 1, -1], [1, 1, 0]):
        y = torch.zeros(3, 8)
        expected = by_rows(y, x, at, slots, 1.0)
        wrapper.update_metadata(slots)
        wrapper.add_lora_linear(y, x, at.lora_a_stacked, at.lora_b_stacked, 1.0, (8,))
        assert torch.allclose(y, expected, atol=1e-5)
