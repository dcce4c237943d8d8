"""Memory for buckets: the same block again, and never while somebody still reads it."""

from __future__ import annotations

import torch

from selfplay.sync.host_memory import MAX_FREE, HostMemory


def test_a_block_is_used_again_once_its_last_view_is_gone() -> None:
    memory = HostMemory()
    first = memory.take(4096)
    where, part = first.data_ptr(), first.view(torch.float32)[7:9]
    del first
    second = memory.take(4096)
    assert second.data_ptr() != where  # ``part`` still lies in the first block
    part.fill_(1.0)
    second.zero_()
    assert part.tolist() == [1.0, 1.0]
    del part
    assert memory.take(4000).data_ptr() == where


def test_a_bucket_gets_its_own_size_and_no_block_that_is_much_larger() -> None:
    memory = HostMemory()
    large = memory.take(4096)
    where = large.data_ptr()
    del large
    small = memory.take(100)
    assert small.shape == (100,)
    assert small.data_ptr() != where
    assert memory.take(4096).data_ptr() == where


def test_only_few_blocks_are_kept() -> None:
    memory = HostMemory()
    taken = [memory.take(1 << 12) for _ in range(MAX_FREE + 3)]
    addresses = [t.data_ptr() for t in taken]
    while taken:
        del taken[0]
    again = [memory.take(1 << 12) for _ in range(MAX_FREE)]
    assert {t.data_ptr() for t in again} == set(addresses[-MAX_FREE:])
