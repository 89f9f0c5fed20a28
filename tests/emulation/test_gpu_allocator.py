"""Cached memory of emulated devices: sizes, segments, streams, and what is freed before memory is out."""

from __future__ import annotations

from collections import Counter

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


#: Bytes of the workspaces of a ResNet-18's convolutions in the order of forward, by the published trace of eight samples.
_WORKSPACES = [
    *[114_048, *[410_880] * 4, 300_672, 1_639_936, 38_528, 1_639_936, 1_639_936],
    *[1_181_952, 6_555_648, 133_376, 6_555_648, 6_555_648],
    *[4_721_024, 26_218_496, 526_720, 26_218_496, 26_218_496],
]

#: Segments of two published snapshots: (bytes, bytes of tensors in use).
_AFTER_ONE_SAMPLE = [
    *[(20 * MIB, 20_971_520), (20 * MIB, 19_398_656), (20 * MIB, 11_042_816), (26 * MIB, 0)],
    *[(2 * MIB, each) for each in (2_097_152, 2_030_592, *[2_007_040] * 5, 2_004_992, 1_505_280, 0)],
]
_AFTER_EIGHT_MORE = [
    *[(20 * MIB, each) for each in (*[20_971_520] * 6, 19_365_888, 12_976_128, 4_816_896)],
    *[(26 * MIB, each) for each in (25_690_112, 25_690_112, 0)],
    *[(2 * MIB, each) for each in (1_772_544, 1_703_936, *[1_605_632] * 4, 802_816, 602_112, 57_344, 32_256)],
    *[(2 * MIB, 0)] * 4,
]


class _ResNet18:
    """The tensors of a ResNet-18 in fp32, in an allocator."""

    def __init__(self) -> None:
        self.allocator = CachingAllocator(0, 32 * GIB)
        self.live: list = []
        for inputs, outputs, kernel in self._convolutions():
            self.keep(4 * inputs * outputs * kernel**2)
            # Weight, bias, running mean and variance of the norm, and the number of its batches.
            self.keep(*[4 * outputs] * 4, 8)
        self.keep(4 * 512 * 1000, 4 * 1000)

    @staticmethod
    def _convolutions():
        yield 3, 64, 7
        inputs = 64
        for width in (64, 128, 256, 512):
            yield from ((inputs, width, 3), (width, width, 3))
            if inputs != width:
                yield inputs, width, 1
            yield from ((width, width, 3), (width, width, 3))
            inputs = width

    def keep(self, *sizes):
        self.live += [self.allocator.allocate(size) for size in sizes]

    def _normed(self, result, channels, workspaces):
        """Return the memory of a norm's result behind a convolution with a result of as many bytes."""
        self.keep(result)
        self.allocator.release(self.allocator.allocate(next(workspaces)))
        chunk = self.allocator.allocate(result)
        self.keep(4 * channels, 4 * channels)
        return chunk

    def forward(self, samples):
        """Return what a forward pass keeps, its result last."""
        before, workspaces = len(self.live), iter(_WORKSPACES)
        self.live.append(self._normed(4 * samples * 64 * 112**2, 64, workspaces))
        pooled = samples * 64 * 56**2
        self.keep(4 * pooled, 8 * pooled)
        for width, side in ((64, 56), (128, 28), (256, 14), (512, 7)):
            result = 4 * samples * width * side**2
            for block in range(2):
                self.live += [self._normed(result, width, workspaces) for _ in range(2)]
                if width > 64 and not block:
                    # The shorter way is added in place, so it is gone.
                    self.allocator.release(self._normed(result, width, workspaces))
        self.keep(4 * samples * 512, 4 * samples * 1000)
        self.allocator.release(self.allocator.allocate(MIB))
        kept = self.live[before:]
        del self.live[before:]
        return kept

    def segments(self, kept):
        """Return the bytes of each segment, and those in use."""
        used = Counter()
        for chunk in (*self.live, *kept):
            used[chunk.segment.number] += chunk.size
        return sorted((segment.size, used[number]) for number, segment in self.allocator._segments.items())


def test_segments_are_those_of_two_published_snapshots_of_a_gpu():
    # Source: zdevito.github.io, "Debugging PyTorch memory use with snapshots" (2022). Its pictures name all segments after
    # model.cuda() and a forward pass of one sample, and after another one of eight. The workspaces are those of "Visualizing
    # PyTorch memory usage over time". Addresses, which decide between chunks of the same size, are not known.
    model = _ResNet18()
    model.keep(4 * 3 * 224**2)
    kept = model.forward(1)
    found = model.segments(kept)
    assert found == sorted(_AFTER_ONE_SAMPLE)
    assert (sum(used for _, used in found), model.allocator.statistics().reserved.now) == (69_086_208, 111_149_056)

    model.keep(4 * 8 * 3 * 224**2)
    second = model.forward(8)
    # The first result had its name until the second was there.
    for chunk in kept:
        model.allocator.release(chunk)
    assert model.allocator.statistics().reserved.now == 299_892_736
    # The second result has one of several segments that are as good.
    result = second.pop()
    published = [(size, 0 if used == result.size else used) for size, used in _AFTER_EIGHT_MORE]
    assert model.segments(second) == sorted(published)
