"""Where the all-gather goes in phases, and where exactly it stops: pure functions, no processes."""

from __future__ import annotations

import itertools
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from smp_config import ConfigError, ModelParallelParameters, smddp
from smp_config.smddp import BUFFER_GRAIN, SCRATCH_VARIABLE, SORT_VARIABLE, BufferSizes
from smp_runtime.smddp.buffers import RingBuffer
from smp_runtime.smddp.layout import HostGrid, agree
from smp_runtime.smddp.process_group import SmddpProcessGroup

P4D = "ml.p4d.24xlarge"


def test_a_grid_has_a_row_for_every_host_whatever_the_order_of_the_ranks():
    grid = HostGrid.of(["b", "a", "a", "b", "a", "b"], 4)
    assert grid.rows == ((0, 3, 5), (1, 2, 4))
    assert (grid.host, grid.local, grid.row, grid.column) == (1, 2, (1, 2, 4), (5, 4))
    assert (grid.hosts, grid.ranks_per_host, grid.size) == (2, 3, 6)


@pytest.mark.parametrize(
    ("host_of", "reason"),
    [
        (["a", "a"], "all 2 ranks of the group are on one host, a"),
        (["a", "a", "b"], "different numbers of the group's ranks: 2 on a, 1 on b"),
        (["a", "b", "c"], "each of its 3 hosts has one rank"),
    ],
)
def test_other_layouts_give_the_reason(host_of, reason):
    assert reason in HostGrid.of(host_of, 0)


@pytest.mark.parametrize("ranks_per_host", [2, 8, *(pytest.param(n, marks=pytest.mark.full) for n in (1, 4, 16))])
@pytest.mark.parametrize("hosts", [2, 4])
def test_both_thresholds_to_the_byte(hosts, ranks_per_host):
    """Sort buffer: 1/8 · degree · input, or what is put there (the input once per host) where that is more."""
    degree = hosts * ranks_per_host
    for scratch, sort in ((8 * BUFFER_GRAIN, 100 * BUFFER_GRAIN), (100 * BUFFER_GRAIN, 8 * BUFFER_GRAIN)):
        sizes = BufferSizes(scratch, sort)

        def falls(size, sizes=sizes):
            return sizes.fallback_reason(size, degree, hosts * size) is not None

        largest = max(size for size in range(1, 101 * BUFFER_GRAIN) if not falls(size))
        assert largest == min(scratch, int(sort / max(degree / 8, hosts)))
        assert not any(falls(size) for size in (1, largest // 2, largest))
        assert all(falls(size) for size in (largest + 1, 2 * largest))


@pytest.mark.parametrize(
    ("sizes", "said"),
    [
        (BufferSizes(BUFFER_GRAIN, 2**20), f"{SCRATCH_VARIABLE}={2 * BUFFER_GRAIN} would do"),
        (BufferSizes(2**20, BUFFER_GRAIN), f"{SORT_VARIABLE}={8 * BUFFER_GRAIN} would do"),
    ],
)
def test_a_shard_of_too_many_pieces_is_logged_with_the_buffer_that_is_too_small(caplog, sizes, said):
    """The first of four ranks on two hosts, alone: nothing is sent. 64 pieces of 16 KiB would be needed."""
    gloo = dist.ProcessGroupGloo(dist.HashStore(), 0, 1, timedelta(seconds=10))
    plain = {"cpu": (dist.ProcessGroup.BackendType.GLOO, gloo)}
    group = SmddpProcessGroup(0, 4, plain, HostGrid.of(["a", "a", "b", "b"], 0), sizes, {"cpu": object()})
    shard = torch.zeros(2**20, dtype=torch.uint8)
    for _ in range(2):
        assert group.gather_in_pieces(shard.new_empty(4 * shard.numel()), shard) is None
    assert (group.fallen_back, group.bytes_fallen_back) == (2, 2 * shard.numel())
    (record,) = caplog.records
    assert record.getMessage().startswith(
        "SMDDP: all-gathers over 4 ranks fall back to the plain backend: the shard of 1048576"
    )
    assert record.getMessage().endswith(f"; {said}")


class _Store(dict):
    def set(self, key, value):
        self[key] = value

    get = dict.__getitem__


@pytest.mark.parametrize(("variable", "value"), [(SCRATCH_VARIABLE, "8191"), (SORT_VARIABLE, "12288")])
def test_a_group_refuses_sizes_that_are_no_multiples(monkeypatch, variable, value):
    monkeypatch.setenv(variable, value)
    with pytest.raises(ConfigError, match=f"{variable} is {value}; it must be a positive multiple of 8192"):
        agree(_Store(), 0, 1)


def test_a_group_refuses_sizes_that_differ(monkeypatch):
    store = _Store({"place/1": '["b", 8192, 134217728]'})
    monkeypatch.delenv(SCRATCH_VARIABLE, raising=False)
    with pytest.raises(ConfigError, match=r"rank 1 .* 8192 and 134217728 bytes, but rank 0 has 16777216 and 134217728"):
        agree(store, 0, 2)


def test_it_is_automatic_in_the_documented_configuration_alone():
    def automatic(instance=P4D, hosts=2, **parameters):
        given = {"ddp": True, "sharded_data_parallel_degree": 2, **parameters}
        return smddp.is_chosen(ModelParallelParameters.from_mp_parameters(given), instance, hosts)

    assert automatic()
    assert not automatic(hosts=1)
    assert not automatic(instance="ml.p4de.24xlarge")
    assert not automatic(instance=None)
    assert not automatic(sharded_data_parallel_degree=1)
    assert not automatic(tensor_parallel_degree=2, prescaled_batch=True)
    assert not automatic(ddp_dist_backend="nccl")
    assert not automatic(ddp_dist_backend="gloo")
    assert automatic(instance="local", hosts=1, ddp_dist_backend="smddp")


def test_pieces_of_a_ring_never_overlap_and_memory_is_allocated_once(cpu_device):
    ring = RingBuffer(1024, cpu_device)
    first, second, third = ring.take(300), ring.take(300), ring.take(300)
    memory = first.bytes.untyped_storage().data_ptr()
    assert ring._place(300) is None  # waits: neither behind them nor before them
    ring.give_back(first)
    fourth = ring.take(256)  # at the beginning again
    spans = sorted((p.bytes.data_ptr(), p.bytes.data_ptr() + p.bytes.numel()) for p in (second, third, fourth))
    assert all(stop <= start for (_, stop), (start, _) in itertools.pairwise(spans))
    assert {p.bytes.untyped_storage().data_ptr() for p in (second, third, fourth)} == {memory}
    assert ring._place(300) is None
    ring.give_back(second)
    ring.give_back(third)
    assert ring._place(300) is not None
    ring.give_back(fourth)
    assert ring.take(1024).bytes.numel() == 1024


@pytest.fixture
def cpu_device():
    import torch

    return torch.device("cpu")
