"""Collectives over memory that the ranks of a host share give what PyTorch's give, whatever the sizes, types and orders."""

from __future__ import annotations

import os

import pytest
import torch

#: Elements, of which the larger are summed in parts; the ranks divide neither of the odd ones.
SIZES = (1, 40, 12_344, 120_008)

SHARED = {"ddp": True, "host_collectives": True}


def _compared():
    """All kinds of collectives, beside PyTorch's; the tensors in ordinary memory and in the arena."""
    import smdistributed.modelparallel.torch as smp
    from smp_config import Group
    from smp_runtime.comm.collectives import TorchCollectives
    from smp_runtime.comm.host.collectives import HostCollectives

    ranks = smp.init().ranks
    group, size = ranks.process_group(Group.DP), smp.dp_size()
    ours = getattr(ranks.collectives, "_inner", ranks.collectives)
    assert isinstance(ours, HostCollectives)
    peer, found = TorchCollectives(), []
    cpu, draw = torch.device("cpu"), torch.Generator().manual_seed(smp.rank())
    for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.int64):
        for elements in SIZES:
            for make in (lambda n, kind: torch.empty(n, dtype=kind), lambda n, kind: ours.empty(n, kind, cpu, group)):
                mine = make(elements * size, dtype)
                mine.copy_(torch.randint(-8, 9, mine.shape, generator=draw))  # sums are exact in any order and type
                results = []
                for collectives in (ours, peer):
                    total, part, whole = mine.clone(), mine.new_empty(elements), mine.new_empty(elements * size)
                    if collectives is ours:
                        given, total = total, make(elements * size, dtype)
                        total.copy_(given)
                    works = [
                        collectives.all_reduce(total, group),
                        collectives.reduce_scatter(part, mine, group),
                        collectives.all_gather(whole, mine[:elements].contiguous(), group),
                    ]
                    for work in works if elements % 3 else reversed(works):
                        work.wait()
                    results.append((total, part, whole))
                found += [torch.equal(one, other) for one, other in zip(*results, strict=True)]
    return found


@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.full)])
def test_they_give_what_pytorch_gives(ranks, world):
    for found in ranks(_compared, world, config=SHARED):
        assert found
        assert all(found)


def _reused():
    """Bytes of the arena after many rounds, with collectives that nobody waits for among them."""
    import smdistributed.modelparallel.torch as smp
    from smp_config import Group
    from smp_runtime.comm.host import shared_memory

    entries, shared_memory._ENTRIES = shared_memory._ENTRIES, 16
    ranks = smp.init({"ddp": True, "host_collectives": True}).ranks
    shared_memory._ENTRIES = entries
    group, cpu = ranks.process_group(Group.DP), torch.device("cpu")
    arena = getattr(ranks.collectives, "_inner", ranks.collectives)._host.arena
    ends = []
    for count in range(100):
        left, flat = (ranks.collectives.empty(20_000, torch.float32, cpu, group).fill_(count) for _ in range(2))
        ranks.collectives.all_reduce(left, group)  # in the order of the group it ends before the next one
        part = torch.empty(10_000)
        ranks.collectives.reduce_scatter(part, flat, group).wait()
        assert part.eq(2 * count).all()
        assert left.eq(2 * count).all()
        smp.barrier()  # or how many are under way together depends on the ranks' speed
        ends.append(arena._end)
    return ends


def test_memory_is_used_again_and_what_nobody_waits_for_ends(ranks):
    for ends in ranks(_reused, 2, init=False):
        assert ends[-1] == ends[10]


def _left():
    """What a rank hears that waits for one that has left, and for one that takes part with another tensor."""
    import smdistributed.modelparallel.torch as smp
    from smp_config import Group

    ranks = smp.init().ranks
    group, heard = ranks.process_group(Group.DP), []

    def reduce(elements):
        try:
            ranks.collectives.all_reduce(torch.ones(elements), group).wait()
        except RuntimeError as error:
            heard.append(str(error))

    reduce(40 + smp.rank())
    if smp.rank() == 1:
        getattr(ranks.collectives, "_inner", ranks.collectives).close()
    reduce(40)
    return heard


def test_a_rank_that_waits_hears_of_one_that_has_left_or_calls_otherwise(ranks):
    waiting, gone = ranks(_left, 2, config=SHARED)
    assert "rank 1 takes part with 164 bytes in a collective in which this rank has 160" in waiting[0]
    assert "Connection closed by peer: rank 1" in waiting[1]
    assert "takes part with 160 bytes" in gone[0]
    assert "Connection closed by peer: this rank" in gone[1]


def _chosen(config, impossible_on=None):
    """What a rank's strategies communicate through, or the error of joining the job."""
    import smdistributed.modelparallel.torch as smp
    from smp_runtime.comm.host import collectives
    from smp_runtime.errors import SMPUserError

    is_possible = collectives.is_possible
    if str(impossible_on) == os.environ["RANK"]:
        collectives.is_possible = lambda: False
    try:
        chosen = smp.init(config).ranks.collectives
    except SMPUserError as error:
        return str(error)
    finally:
        collectives.is_possible = is_possible
    return type(getattr(chosen, "_inner", chosen)).__name__


@pytest.mark.parametrize(
    ("asked", "process_mode", "found"),
    [
        (None, True, "HostCollectives"),
        (None, False, "TorchCollectives"),
        (False, True, "TorchCollectives"),
        (True, False, "HostCollectives"),
    ],
)
def test_memory_is_shared_in_process_mode_and_where_asked_for(ranks, asked, process_mode, found):
    config = {"ddp": True} if asked is None else {"ddp": True, "host_collectives": asked}
    assert ranks(_chosen, 2, config, init=False, process_mode=process_mode) == [found] * 2


def test_where_it_is_impossible_it_is_refused_if_asked_for_and_else_left(ranks):
    refused = ranks(_chosen, 2, SHARED, 1, init=False)
    assert all("host_collectives is true, but rank 1 cannot share memory" in said for said in refused)
    assert ranks(_chosen, 2, {"ddp": True}, 1, init=False, process_mode=True) == ["TorchCollectives"] * 2


def _waited_for_twice():
    """What is left of a shard that the rank changes after it has waited for it, when something else waits once more."""
    import smdistributed.modelparallel.torch as smp
    from smp_config import Group

    ranks = smp.init().ranks
    group, shard = ranks.process_group(Group.DP), torch.empty(4)
    work = ranks.collectives.reduce_scatter(shard, torch.ones(8), group)
    work.wait()
    shard.div_(2)
    work.wait()
    return shard.tolist()


@pytest.mark.both_transports
def test_a_second_wait_does_nothing(ranks):
    assert ranks(_waited_for_twice, 2, config={"ddp": True}) == [[1.0] * 4] * 2
