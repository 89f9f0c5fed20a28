"""The all-gather in phases against the plain one: every type, odd sizes, both ways of waiting, every form, every layout."""

from __future__ import annotations

import logging
import os
import warnings

import pytest
import torch
import torch.distributed as dist
from support.logs import logged
from support.ranks.smddp_groups import join

#: Elements: one, odd, the largest that goes in one message, and several parts that are not equal.
SIZES = (1, 3, 1021, 300_007)

DTYPES = [
    *(torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.complex64, torch.complex128, torch.bool),
    *(torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint16, torch.uint32, torch.uint64),
    *(torch.float8_e4m3fn, torch.float8_e5m2),
]
SAMPLE = [torch.float32, torch.bfloat16, torch.bool, torch.complex64]

#: Ranks and hosts; the shared ranks are four.
LAYOUTS = [(4, 2), pytest.param(2, 1, marks=pytest.mark.full), pytest.param(2, 2, marks=pytest.mark.full)]
LARGE_LAYOUTS = [(8, 1), (8, 2), (8, 4), (6, 2)]


def _compare(hosts, dtypes, sizes, order="blocks"):
    """Every dtype and size in every form; gives how many went in phases, and how many did not."""
    warnings.filterwarnings("ignore", category=FutureWarning)
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    group = join(rank * hosts // size if order == "blocks" else rank % hosts)

    def contents(of, dtype, count):
        most = 2 if dtype is torch.bool else 256
        return ((torch.arange(count * dtype.itemsize) * 7 + of) % 251 % most).to(torch.uint8).view(dtype)

    def same(found, wanted):
        dense = torch.empty_like(wanted).copy_(found.reshape(wanted.shape))
        return torch.equal(dense.view(torch.uint8), wanted.view(torch.uint8))

    for dtype in dtypes:
        for count in sizes:
            shards = [contents(other, dtype, count) for other in range(size)]
            mine, wanted = shards[rank], torch.cat([s.view(torch.uint8) for s in shards]).view(dtype)
            for asynchronous in (False, True):
                one = torch.empty(size * count, dtype=dtype)
                work = dist.all_gather_into_tensor(one, mine, async_op=asynchronous)
                if asynchronous:
                    work.wait()
                    assert work.is_completed()
                    assert work.is_success()
                assert same(one, wanted), (dtype, count, asynchronous, "one")
                several = [torch.empty(count, dtype=dtype) for _ in range(size)]
                work = dist.all_gather(several, mine, async_op=asynchronous)
                if asynchronous:
                    work.wait()
                assert all(same(a, b) for a, b in zip(several, shards, strict=True)), (dtype, count, "list")
            # In place, and into memory with gaps.
            one = torch.zeros(size * count, dtype=dtype)
            one[rank * count : (rank + 1) * count] = mine
            dist.all_gather_into_tensor(one, one[rank * count : (rank + 1) * count])
            assert same(one, wanted), (dtype, count, "in place")
            if not isinstance(group.grid, str):
                wide = torch.zeros(size * count, 2, dtype=dtype)
                group.all_gather_single(wide[:, 0], mine).wait()
                assert same(wide[:, 0], wanted), (dtype, count, "gaps")
                wides = [torch.zeros(count, 2, dtype=dtype) for _ in range(size)]
                group.allgather([[wide[:, 1] for wide in wides]], [mine]).wait()
                assert all(same(w[:, 1], s) for w, s in zip(wides, shards, strict=True))
    counts = (group.in_phases, group.fallen_back)
    dist.destroy_process_group()
    return counts


@pytest.mark.parametrize("order", ["blocks", "in turn"])
@pytest.mark.parametrize(("world", "hosts"), LAYOUTS)
def test_every_form_of_a_few_types(ranks, world, hosts, order):
    for phases, fallen in ranks(_compare, world, hosts, SAMPLE, (1, 1021, 300_007), order, init=False):
        assert (phases > 0, fallen > 0) == ((True, False) if 1 < hosts < world else (False, True))


@pytest.mark.full
@pytest.mark.timeout(300)
def test_every_type(ranks):
    ranks(_compare, 4, 2, DTYPES, SIZES, init=False, timeout=240)


@pytest.fixture(scope="module")
def eight_ranks():
    from support.ranks.rank_pool import RankPool

    with RankPool(8) as pool:
        yield pool.run


@pytest.mark.full
@pytest.mark.timeout(300)
@pytest.mark.parametrize("order", ["blocks", "in turn"])
@pytest.mark.parametrize(("world", "hosts"), LARGE_LAYOUTS)
def test_up_to_eight_ranks(eight_ranks, world, hosts, order):
    eight_ranks(_compare, world, hosts, SAMPLE, SIZES, order, init=False, timeout=240)


def _many_at_once(buffers):
    """More all-gathers under way than the buffers hold, waited for in another order; subgroups; coalesced; functional."""
    import torch.distributed._functional_collectives as functional

    warnings.filterwarnings("ignore", category=FutureWarning)
    rank = int(os.environ["RANK"])
    os.environ.update(buffers)
    group = join(rank // 2)
    sizes = [10_000, 1, 40_000, 5_000, 40_000, 77, 20_000, 3] * 3
    shards = [torch.full((size,), float(100 * number + rank)) for number, size in enumerate(sizes)]
    outputs = [torch.empty(4 * size) for size in sizes]
    works = [dist.all_gather_into_tensor(o, s, async_op=True) for o, s in zip(outputs, shards, strict=True)]
    total = torch.ones(1)
    dist.all_reduce(total)  # other collectives in between
    for work in reversed(works):
        work.wait()
    for number, output in enumerate(outputs):
        assert torch.equal(output.view(4, -1)[:, 0], torch.tensor([100.0 * number + r for r in range(4)]))
        assert torch.equal(output.view(4, -1)[:, -1], output.view(4, -1)[:, 0])
    assert float(total) == 4
    memory = group._gathers["cpu"].sort
    before = memory._memory.data_ptr()
    x = torch.full((3, 2), float(rank))
    gathered = functional.all_gather_tensor(x, 0, group)
    assert torch.equal(gathered[::3, 0] + 0, torch.arange(4.0))
    with dist._coalescing_manager(async_ops=True) as both:
        a, b = torch.empty(4), torch.empty(8)
        dist.all_gather_into_tensor(a, x[0, :1])
        dist.all_gather_into_tensor(b, x[0])
    both.wait()
    assert torch.equal(a, torch.arange(4.0))
    assert torch.equal(b, torch.arange(4.0).repeat_interleave(2))
    gathered_objects = [None] * 4
    dist.all_gather_object(gathered_objects, {"rank": rank})
    assert gathered_objects == [{"rank": r} for r in range(4)]
    # The future that C++ code and communication hooks wait for.
    work = dist.all_gather_into_tensor(a, 2 * x[0, :1], async_op=True)
    assert torch.equal(
        work.get_future().then(lambda future: torch.cat(future.value()) + 1).wait(), 2 * torch.arange(4.0) + 1
    )
    assert memory._memory.data_ptr() == before
    # Subgroups: on one host (plain), across hosts with gaps, and with only some of the ranks.
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3]), dist.new_group([0, 3]), dist.new_group([3, 2, 1, 0])]
    for pair, members in zip(pairs, ([0, 1], [2, 3], [0, 3], [0, 1, 2, 3]), strict=True):
        if rank in members:
            assert dist.get_backend(pair) == "smddp"
            found = torch.empty(len(members))
            dist.all_gather_into_tensor(found, torch.tensor([float(rank)]), group=pair)
            assert found.tolist() == [float(member) for member in members]
            assert (pair.in_phases > 0) == (len(members) == 4)
    counted = (group.in_phases, group.fallen_back)
    dist.destroy_process_group()
    return counted


@pytest.mark.parametrize("scratch", [16 * 2**20, 20 * 8192])
def test_many_at_once_through_buffers_that_hold_few(ranks, scratch):
    sizes = {"SMDDP_AG_SCRATCH_BUFFER_SIZE_BYTES": str(scratch), "SMDDP_AG_SORT_BUFFER_SIZE_BYTES": str(2 * scratch)}
    for phases, fallen in ranks(_many_at_once, 4, sizes, init=False):
        assert phases >= 24
        assert fallen == 0


def _fall_back(elements):
    rank = int(os.environ["RANK"])
    with logged(logging.NOTSET) as said:
        group, went = join(rank // 2), []
        for count in elements:
            for _ in range(2):
                before = group.in_phases
                output = torch.empty(4 * count, dtype=torch.uint8)
                dist.all_gather_into_tensor(output, torch.full((count,), rank, dtype=torch.uint8))
                assert output.view(4, -1)[:, -1].tolist() == [0, 1, 2, 3]
            went.append(group.in_phases - before == 1)
    dist.destroy_process_group()
    return went, said


@pytest.mark.parametrize(
    ("scratch", "sort", "largest", "variable"),
    [
        (2, 100, 2 * 8192, "SCRATCH"),
        (100, 3, 3 * 4096, "SORT"),  # two hosts: each input is put there twice, more than 4/8 of it
    ],
)
def test_it_falls_back_exactly_beyond_what_the_buffers_hold_and_says_so_once(ranks, scratch, sort, largest, variable):
    env = {
        "SMDDP_AG_SCRATCH_BUFFER_SIZE_BYTES": str(scratch * 8192),
        "SMDDP_AG_SORT_BUFFER_SIZE_BYTES": str(sort * 8192),
    }
    answers = ranks(_fall_back, 4, [1, largest, largest + 1, 2 * largest, largest], init=False, env=env)
    assert all(went == [True, True, False, False, True] for went, _ in answers)
    said = answers[0][1]
    assert len(said) == 1
    assert not any(lines for _, lines in answers[1:])
    assert f"SMDDP_AG_{variable}_BUFFER_SIZE_BYTES={(scratch if variable == 'SCRATCH' else sort) * 8192}" in said[0]
    assert str(largest + 1) in said[0]
