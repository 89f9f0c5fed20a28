"""Host memory that devices copy to and from: its bytes, how often the host waits, and that no copy is read too early."""

from __future__ import annotations

import logging
import os

import pytest
import torch
from support.faults.planted import planted

from smp_emulation.checked import emulated
from smp_emulation.checked.streams.faults import StreamFault
from smp_runtime.checkpoint.memory.host_folder import Data, slots_of
from smp_runtime.tensors.host_memory import pinned_memory, pinned_pool, staging
from smp_runtime.tensors.host_memory.pinned_pool import PinnedPool
from smp_runtime.tensors.host_memory.snapshot import StagingArena, TensorSnapshot

WINDOW, SECONDS = 4096, 30
DEVICE = torch.device("cuda", 0)


@pytest.fixture
def emulation(monkeypatch):
    monkeypatch.setattr(staging, "WINDOW", WINDOW)
    with emulated(seed=2) as emulation:
        yield emulation


def _forms(device=DEVICE):
    """Small, large, without elements, on the host, not contiguous, a number, of other types."""
    made = [torch.randn(size, device=device) for size in (5, 3000, 0, 333)]
    others = [torch.randn(3), torch.randn(50, 40, device=device).t(), torch.ones((), device=device)]
    return [*made, *others, torch.ones(4, dtype=torch.bfloat16, device=device), torch.tensor([True], device=device)]


def _registered(emulation):
    ranges = emulation.devices.memory.registered._ranges
    return sum(stop - start for start, stop in ranges.items())


def _waits(emulation):
    found = [kind for (kind, line), count in emulation.waits.items() for _ in range(count) if "host_memory" in line]
    emulation.waits.clear()
    return found


def _equal(copies, tensors):
    return all(torch.equal(copied, tensor.cpu()) for copied, tensor in zip(copies, tensors, strict=True))


def test_the_first_copy_goes_through_chunks_and_later_ones_wait_for_nothing(emulation):
    tensors = _forms()
    size = staging.lay_out(tensors)[1]
    windows = -(-size // WINDOW)
    assert windows > staging.CHUNKS
    arena = StagingArena(DEVICE)
    copies = arena.copy(tensors)  # nothing is under way, as nothing was pinned
    waits = _waits(emulation)
    assert waits.count("Event.synchronize") == windows
    assert _equal(copies, tensors)
    assert _registered(emulation) == arena.pinned_bytes == 0  # chunks are gone
    assert arena.bytes == size <= sum(tensor.nbytes for tensor in tensors) + 64 * len(tensors)

    arena.pin_later()
    assert arena.wait_until_pinned(SECONDS)
    assert _registered(emulation) == arena.pinned_bytes == arena.bytes
    for tensor in tensors:
        tensor.fill_(1)
    _waits(emulation)
    copies = arena.copy(tensors)
    assert not _waits(emulation)
    torch.cuda.synchronize()
    assert _equal(copies, tensors)
    arena.close()
    assert _registered(emulation) == 0
    assert _equal(copies, tensors)
    assert _equal(arena.copy(tensors), tensors)


def test_memory_that_is_partly_pinned_and_an_arena_that_grows(emulation):
    tensors = _forms()
    arena = StagingArena(DEVICE)
    with planted("smp_runtime.tensors.host_memory.staging:StagingMemory._pin", "range(", "range(1, "):
        arena.copy(tensors)
        arena.pin_later()
        assert not arena.wait_until_pinned(SECONDS)
    copies = arena.copy(tensors)
    torch.cuda.synchronize()
    assert _equal(copies, tensors)
    more = [*tensors, torch.randn(5000, device=DEVICE)]
    assert _equal(arena.copy(more), more)
    assert arena.bytes == staging.lay_out(more)[1]
    assert _registered(emulation) == 0


def test_a_copy_that_is_read_too_early_is_found(emulation):
    tensors, arena = [torch.randn(3000, device=DEVICE)], StagingArena(DEVICE)
    arena.copy(tensors)
    arena.pin_later()
    arena.wait_until_pinned(SECONDS)
    copied = arena.copy(tensors)[0]
    with pytest.raises(StreamFault, match="nothing orders two accesses to pinned host memory"):
        copied.sum()
    torch.cuda.synchronize()
    emulation.faults.clear()


def test_memory_that_is_unpinned_too_early_is_found(emulation):
    ranges = pinned_memory.PinnedRanges(DEVICE)
    memory = torch.frombuffer(pinned_memory.map_memory(64, for_gpu=True), dtype=torch.uint8)
    ranges.add(memory[:64])
    with planted("smp_runtime.tensors.host_memory.pinned_memory:_unregister", "torch.cuda.synchronize(device)", "pass"):
        memory[:64].copy_(torch.ones(64, dtype=torch.uint8, device=DEVICE), non_blocking=True)
        ranges.close()
    torch.cuda.synchronize()
    assert "is unregistered" in emulation.faults[0]
    emulation.faults.clear()


def test_memory_that_cannot_be_pinned_is_used_as_it_is(emulation, monkeypatch, caplog):
    class Refusing:
        def cudaHostRegister(self, *_):  # noqa: N802 - CUDA's name
            return 2

    monkeypatch.setattr(torch.cuda, "cudart", Refusing)
    tensors, arena = _forms(), StagingArena(DEVICE)
    with caplog.at_level(logging.WARNING, "smp"):
        assert _equal(arena.copy(tensors), tensors)
        arena.pin_later()
        assert not arena.wait_until_pinned(SECONDS)
        assert _equal(arena.copy(tensors), tensors)
    assert "cannot be pinned (CUDA error 2)" in caplog.text


@pytest.mark.parametrize("place", [DEVICE, torch.device("cpu")], ids=str)
def test_a_snapshot_has_tensors_with_storages_of_their_own(emulation, place):
    arena = StagingArena(place)
    for _ in range(2):
        tensors, snapshot = _forms(place), TensorSnapshot()
        kept = [snapshot.keep("", tensor) for tensor in tensors]
        assert [copied.shape for copied in kept] == [tensor.shape for tensor in tensors]
        snapshot.copy_to(arena)
        torch.cuda.synchronize()
        assert _equal(kept, tensors)
        assert all(copied.untyped_storage().nbytes() == copied.nbytes for copied in kept)
        arena.pin_later()
        assert arena.wait_until_pinned(SECONDS) == (place == DEVICE)
    arena.close()


def test_a_memory_checkpoint_waits_once_and_is_unpinned_before_its_memory_goes(emulation, tmp_path):
    tensors = _forms()
    data = Data(tmp_path / "data", slots_of(tensors), new=True)
    data.copy(tensors, DEVICE)
    assert data._staging.wait_until_pinned(SECONDS)
    assert data.pinned_bytes == data.bytes.numel() == _registered(emulation)
    emulation.waits.clear()
    data.copy(tensors, DEVICE)
    assert [kind for kind, _ in emulation.waits.elements()] == ["Stream.synchronize"]
    assert _equal(data.tensors, tensors)
    del data
    assert _registered(emulation) == 0


def test_the_pool_takes_the_bytes_that_were_away_at_once(emulation, monkeypatch):
    monkeypatch.setattr(pinned_pool, "SLAB", 4096)
    pool, stream = PinnedPool(DEVICE), torch.cuda.Stream()
    size = 3 * 512
    tensors = [torch.randn(size // 4, device=DEVICE) for _ in range(6)]
    for _ in range(3):
        taken = [pool.take(tensor, stream) for tensor in tensors]
        assert pool.bytes == _registered(emulation) == 6 * size  # two mappings of three: no power of two
        addresses = [host.data_ptr() for host, _ in taken]
        assert len({address // 512 for address in addresses}) == 6
        for _, block in taken:
            pool.give_back(block, stream.record_event())
    # Other sizes and forms come from what is free.
    like = torch.randn(20, 30, device=DEVICE).t()
    host, block = pool.take(like, stream)
    assert (host.shape, host.stride()) == (like.shape, like.stride())
    assert pool.bytes == 6 * size
    assert pool.take(torch.empty(0, device=DEVICE), stream)[0].numel() == 0
    del pool, host, taken
    assert _registered(emulation) == 0


def _use_again():
    """Copy out, in and out again, through the same host memory."""
    pool, out, back = PinnedPool(DEVICE), torch.cuda.Stream(), torch.cuda.Stream()
    tensor = torch.ones(100, device=DEVICE)
    made = torch.empty(100, device=DEVICE)
    for stream in (out, back):
        stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(out):
        host, block = pool.take(tensor, out)
        host.copy_(tensor, non_blocking=True)
    back.wait_stream(out)
    with torch.cuda.stream(back):
        made.copy_(host, non_blocking=True)
        pool.give_back(block, back.record_event())
    del host
    with torch.cuda.stream(out):
        pool.take(tensor, out)[0].copy_(tensor, non_blocking=True)
    torch.cuda.synchronize()
    return made.sum().item()


def test_host_memory_is_used_again_only_after_it_is_read(emulation):
    assert _use_again() == 100
    with (
        planted("smp_runtime.tensors.host_memory.pinned_pool:PinnedPool.take", "stream.wait_event(event)", "pass"),
        pytest.raises(StreamFault, match="nothing orders two accesses to pinned host memory"),
    ):
        _use_again()
    torch.cuda.synchronize()
    emulation.faults.clear()


def test_a_forked_process_leaves_the_memory_alone(emulation):
    ranges = pinned_memory.PinnedRanges(DEVICE)
    memory = torch.frombuffer(pinned_memory.map_memory(64, for_gpu=True), dtype=torch.uint8)
    ranges.add(memory)
    child = os.fork()
    if child == 0:
        del memory
        ranges._end()
        os._exit(0 if ranges.bytes and pinned_memory._inherited else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert not pinned_memory._inherited
    ranges.close()
