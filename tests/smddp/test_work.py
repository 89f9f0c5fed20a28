"""An all-gather under way: its callbacks, its limits, what it reports, and what happens after a failure."""

from __future__ import annotations

import os
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from support.ranks.smddp_groups import all_gather_single, join


def _hooks(blocking, count):
    """Callbacks that gather again over the same group, as PyTorch's quantizing communication hook does."""
    rank = int(os.environ["RANK"])
    group = join(rank // 2)

    def gather(value, asynchronous):
        full = torch.empty(4 * count)
        return full, all_gather_single(full, torch.full((count,), value), async_op=asynchronous)

    def again(future):
        mine = future.value()[rank][0].item()
        if blocking:
            full, _ = gather(10 * mine, False)
            return full
        full, work = gather(10 * mine, True)
        return torch.cat(work.get_future().wait())

    def and_again(future):
        full, work = gather(2 * future.value()[rank * count].item(), True)
        work.wait()
        return full

    found = []
    for _ in range(3):
        _, work = gather(float(rank + 1), True)
        found.append(work.get_future().then(again).then(and_again).wait().view(4, -1)[:, -1].tolist())
    # A second one is queued when the callback's begins.
    _, first = gather(1.0 + rank, True)
    before = first.get_future()
    inner = before.then(lambda future: time.sleep(0.05 * blocking) or future.value()[3][0].item())
    full, second = gather(float(rank), True)
    second.wait()
    assert inner.wait() == 4
    assert full.view(4, -1)[:, 0].tolist() == [0, 1, 2, 3]
    phases = group.in_phases
    dist.destroy_process_group()
    return found, phases


@pytest.mark.parametrize("count", [5, 100_000])
@pytest.mark.parametrize("blocking", [False, True])
def test_callbacks_may_gather_over_the_same_group(ranks, blocking, count):
    for found, phases in ranks(_hooks, 4, blocking, count, init=False):
        assert found == [[20.0, 40.0, 60.0, 80.0]] * 3
        assert phases == 11


def _late():
    rank = int(os.environ["RANK"])
    group = join(rank // 2)
    full, shard, said = torch.empty(4), torch.tensor([float(rank)]), None
    dist.barrier()
    if rank == 0:
        work = all_gather_single(full, shard, async_op=True)
        began = time.monotonic()
        try:
            work.wait(timedelta(seconds=0.2))
        except RuntimeError as error:
            said = str(error)
        assert 0.15 < time.monotonic() - began < 5
        assert not work.is_completed()
        assert not work.is_success()
    dist.barrier()
    if rank != 0:
        work = all_gather_single(full, shard, async_op=True)
    # No limit, in all the ways to say so.
    for none in ((), (timedelta(0),), (timedelta(milliseconds=-1),)):
        assert work.wait(*none)
    assert full.tolist() == [0, 1, 2, 3]
    assert work.is_success()
    assert [part.tolist() for part in work.get_future().value()] == [[0], [1], [2], [3]]
    assert [part.tolist() for part in work.result()] == [[0], [1], [2], [3]]
    if hasattr(dist.ProcessGroup, "set_timeout"):  # PyTorch 2.8 does not ask for it
        group.set_timeout(timedelta(seconds=50))
    all_gather_single(full, shard)
    dist.destroy_process_group()
    return said


def test_a_wait_ends_at_its_limit_and_can_be_repeated(ranks):
    said = ranks(_late, 4, init=False)
    assert "timed out" in said[0]
    assert said[1:] == [None] * 3


def _reports():
    rank = int(os.environ["RANK"])
    join(rank // 2)
    gloo = dist.new_group(backend="gloo")
    shard, found = torch.full((2, 3), float(rank)), []
    for group in (dist.group.WORLD, gloo):
        answers = []
        work = all_gather_single(torch.empty(8, 3), shard, group=group, async_op=True)
        future = work.get_future()
        work.wait()
        answers.append(future.value())
        work = dist.all_gather([torch.empty(2, 3) for _ in range(4)], shard, group=group, async_op=True)
        answers.append(work.get_future().wait())
        found.append([[(tuple(t.shape), t.flatten().tolist()) for t in answer] for answer in answers])
    dist.destroy_process_group()
    return found


def test_a_future_has_what_that_of_gloo_has(ranks):
    for ours, plain in ranks(_reports, 4, init=False):
        assert ours == plain


def _lazy_bits():
    """Only rank 1 hands in a conjugated and negated view, and only rank 2 wants its output in one."""
    rank = int(os.environ["RANK"])
    group = join(rank // 2)
    values = torch.arange(3) + 1j * (rank + 1)
    shard = values.conj().resolve_conj().conj() if rank == 1 else values
    assert shard.is_conj() == (rank == 1)
    full = torch.zeros(12, dtype=torch.complex64)
    full = full.conj() if rank == 2 else full
    group.all_gather_single(full, shard).wait()  # PyTorch's function in front of it takes no conjugated views
    expected = torch.cat([torch.arange(3) + 1j * (r + 1) for r in range(4)])
    assert torch.equal(full.resolve_conj(), expected)
    real = torch.full((3,), float(rank))
    several = [torch.zeros(3) for _ in range(4)]
    if rank == 2:
        several = [torch._neg_view(t) for t in several]
    dist.all_gather(several, torch._neg_view(-real) if rank == 1 else real)
    assert [t.resolve_neg().tolist() for t in several] == [[float(r)] * 3 for r in range(4)]
    counts = group.in_phases, group.fallen_back
    dist.destroy_process_group()
    return counts


def test_one_ranks_views_do_not_send_it_another_way(ranks):
    assert ranks(_lazy_bits, 4, init=False) == [(2, 0)] * 4


def _broken(how):
    """Something goes wrong on all ranks; whoever comes later is told, and nobody waits."""
    rank = int(os.environ["RANK"])
    group, said = join(rank // 2), []
    gather = group._gathers["cpu"]
    full, shard = torch.empty(4), torch.tensor([float(rank)])
    all_gather_single(full, shard)

    class Lost:
        def __getattr__(self, name):
            raise RuntimeError("connection closed")

    backend = gather._backend
    if how == "abort":
        gather.abort()
    else:
        gather._backend = Lost()
    for _ in range(2):
        try:
            all_gather_single(full, shard)
        except RuntimeError as error:
            said.append(str(error))
        gather._backend = backend
    dist.barrier()
    dist.destroy_process_group()
    return said


@pytest.mark.parametrize("how", ["abort", "lost"])
def test_after_a_failure_nobody_waits_for_memory_that_never_comes_back(ranks, how):
    for first, second in ranks(_broken, 4, how, init=False):
        assert ("aborted" if how == "abort" else "connection closed") in first
        assert "an earlier all-gather of this group failed" in second


def _broken_while_others_wait_for_room():
    """Three all-gathers, of which the buffers hold one; the second rank loses its connections after the first has begun."""
    rank = int(os.environ["RANK"])
    group, said = join(rank // 2), []
    gather = group._gathers["cpu"]
    full, shard = torch.empty(4 * 2048), torch.full((2048,), float(rank))
    hand_on = gather._hand_on

    def lost(_):
        deadline = time.monotonic() + 20
        while len(gather._later) < 2 and time.monotonic() < deadline:
            time.sleep(0.001)
        raise RuntimeError("connection closed")

    gather._hand_on = lost
    works = [all_gather_single(full, shard, async_op=True) for _ in range(3)]
    for work in works:
        try:
            work.wait()
        except RuntimeError as error:
            said.append(str(error))
    gather._hand_on = hand_on
    dist.barrier()
    dist.destroy_process_group()
    return said


def test_after_a_failure_those_that_wait_for_room_end_too(ranks):
    env = {"SMDDP_AG_SCRATCH_BUFFER_SIZE_BYTES": "8192", "SMDDP_AG_SORT_BUFFER_SIZE_BYTES": "16384"}
    for first, *later in ranks(_broken_while_others_wait_for_room, 4, init=False, env=env):
        assert "connection closed" in first
        assert ["an earlier all-gather of this group failed" in said for said in later] == [True, True]
