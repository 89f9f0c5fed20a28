"""Cached memory of emulated devices: sizes, segments, streams, and what is freed before memory is out."""

from __future__ import annotations

import pytest
import torch

from smp_emulation.gpu_model.allocator import CachingAllocator

MIB, GIB = 2**20, 2**30


def _amounts(allocator):
    found = allocator.statistics()
    return found.allocated.now, found.reserved.now


@pytest.mark.parametrize(
    ("size", "allocated", "reserved"),
    [
        (1, 512, 2 * MIB),
        (513, 1024, 2 * MIB),
        (MIB, MIB, 2 * MIB),
        (MIB + 1, MIB + 512, 20 * MIB),
        (10 * MIB - 512, 10 * MIB - 512, 20 * MIB),
        (10 * MIB, 10 * MIB, 10 * MIB),
        (11 * MIB - 100, 12 * MIB, 12 * MIB),  # a rest of up to 1 MiB is not split off
        (33 * MIB, 34 * MIB, 34 * MIB),
    ],
)
def test_sizes_and_segments_are_rounded(size, allocated, reserved):
    allocator = CachingAllocator(0, GIB)
    allocator.allocate(size)
    assert _amounts(allocator) == (allocated, reserved)
    assert allocator.statistics().requested.now == size


def test_segments_are_split_and_joined_again():
    allocator = CachingAllocator(0, GIB)
    chunks = [allocator.allocate(5 * MIB) for _ in range(4)]
    assert _amounts(allocator) == (20 * MIB, 20 * MIB)
    for place in (1, 3, 2, 0):
        allocator.release(chunks[place])
    assert _amounts(allocator) == (0, 20 * MIB)
    allocator.allocate(19 * MIB)
    assert _amounts(allocator) == (20 * MIB, 20 * MIB)


def test_the_smallest_chunk_that_is_large_enough_is_taken():
    allocator = CachingAllocator(0, GIB)
    large, small = allocator.allocate(40 * MIB), allocator.allocate(20 * MIB)
    allocator.release(large)
    allocator.release(small)
    assert allocator.allocate(18 * MIB).segment is small.segment
    assert allocator.allocate(30 * MIB).segment is large.segment


def test_small_and_large_requests_share_no_segment():
    allocator = CachingAllocator(0, GIB)
    allocator.release(allocator.allocate(30 * MIB))
    allocator.allocate(100)
    assert allocator.statistics().reserved.now == 32 * MIB


def test_memory_is_reused_on_its_stream_only():
    allocator = CachingAllocator(0, GIB)
    allocator.release(allocator.allocate(30 * MIB, stream=1))
    allocator.allocate(30 * MIB, stream=2)
    assert allocator.reserved_by_stream() == {1: 30 * MIB, 2: 30 * MIB}
    allocator.allocate(30 * MIB, stream=1)
    assert allocator.statistics().reserved.now == 60 * MIB


def test_memory_that_a_stream_may_use_is_not_reused():
    allocator = CachingAllocator(0, GIB)
    chunk = allocator.allocate(30 * MIB)
    allocator.release(chunk, is_pending=True)
    allocator.allocate(30 * MIB)
    found = allocator.statistics()
    assert (found.allocated.now, found.active.now, found.reserved.now) == (30 * MIB, 60 * MIB, 60 * MIB)
    allocator.end_use(chunk)
    allocator.allocate(30 * MIB)
    assert _amounts(allocator) == (60 * MIB, 60 * MIB)


def test_emptying_returns_whole_segments_only():
    allocator = CachingAllocator(0, GIB)
    kept, chunk = allocator.allocate(5 * MIB), allocator.allocate(5 * MIB)
    for freed in (chunk, allocator.allocate(40 * MIB), allocator.allocate(50 * MIB, stream=3)):
        allocator.release(freed)
    allocator.empty_cache()
    assert _amounts(allocator) == (5 * MIB, 20 * MIB)
    allocator.release(kept)
    allocator.empty_cache()
    assert _amounts(allocator) == (0, 0)
    assert allocator.statistics().reserved.peak == 110 * MIB


def test_the_cache_is_freed_before_memory_is_out():
    allocator = CachingAllocator(1, 100 * MIB)
    allocator.release(allocator.allocate(60 * MIB, stream=1))
    chunk = allocator.allocate(70 * MIB)  # the first segment goes back
    found = allocator.statistics()
    assert (found.retries, found.out_of_memory, found.reserved.now) == (1, 0, 70 * MIB)
    with pytest.raises(
        torch.OutOfMemoryError, match=r"(?s)CUDA out of memory\. Tried to allocate 40\.00 MiB\. GPU 1 .*100\.00 MiB"
    ):
        allocator.allocate(40 * MIB)
    allocator.release(chunk)
    allocator.allocate(40 * MIB)
    assert allocator.statistics().out_of_memory == 1
