"""The two phases of CUDA's all-gather, run over gloo on CPU; and a checkpoint of PyTorch's own over the backend."""

from __future__ import annotations

import os

import pytest
import torch
import torch.distributed as dist
from support.ranks.smddp_groups import join

from smp_runtime.smddp.streams import _block


def test_rows_are_one_block_only_where_they_follow_each_other():
    memory = torch.arange(12, dtype=torch.uint8)
    rows = memory.view(4, 3)
    assert _block(list(rows[1:3])).tolist() == list(range(3, 9))
    assert _block([rows[2]]).tolist() == [6, 7, 8]
    assert _block([rows[0], rows[2]]) is None
    assert _block([rows[1], rows[0]]) is None
    assert _block([rows[0], rows[1].clone()]) is None


def _phases(order):
    from smp_config.smddp import BufferSizes
    from smp_runtime.smddp.items import GatherItem
    from smp_runtime.smddp.layout import HostGrid
    from smp_runtime.smddp.streams import StreamGather

    rank = int(os.environ["RANK"])
    hosts = [number // 2 if order == "blocks" else number % 2 for number in range(4)]
    join(hosts[rank], "gloo")
    grid = HostGrid.of([str(host) for host in hosts], rank)
    pairs = {pair: dist.new_group(pair) for pair in ((0, 1), (2, 3), (0, 2), (1, 3))}
    gather = StreamGather(pairs[grid.column], pairs[grid.row], grid, BufferSizes(8192, 16384))
    for count in (1, 1021, 4):
        shard, wanted = torch.full((count, 2), float(rank)), [[float(r)] * 2 * count for r in range(4)]
        one, wide = torch.empty(4 * count, 2), torch.zeros(4 * count, 2, 2)
        lists = [torch.empty(count, 2) for _ in range(4)], [torch.empty(2 * count) for _ in range(4)]
        items = [
            GatherItem.into_one(one, shard, 4),
            GatherItem.into_one(wide[..., 0], shard, 4),
            GatherItem.into_list(lists[0], shard, 4),
            GatherItem.into_list(lists[1], shard, 4, through_one=True),
        ]
        work = gather.start(items)
        assert work.wait()
        assert work.is_success()
        assert one.view(4, -1).tolist() == wanted
        assert wide[..., 0].reshape(4, -1).tolist() == wanted
        assert not wide[..., 1].any()
        assert all([t.flatten().tolist() for t in several] == wanted for several in lists)
        # Pieces, by the free part of the sort buffer and, where that is too small, without it.
        for step in (64, 4096 if count > 1000 else 64):
            one.fill_(-1)
            assert gather.start(GatherItem.into_pieces(one, shard, 4, step)).wait()
            assert one.view(4, -1).tolist() == wanted
        # NCCL reports a list of tensors as one with a dimension more.
        reported = gather.start(items[3:]).get_future().value()
        assert [tuple(t.shape) for t in reported] == [(4, count, 2)]
    dist.destroy_process_group()


@pytest.mark.parametrize("order", ["blocks", "in turn"])
def test_both_phases_put_every_shard_in_rank_order(ranks, order):
    ranks(_phases, 4, order, init=False)


def _checkpoint(folder):
    import torch.distributed.checkpoint as checkpoints
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    rank = int(os.environ["RANK"])
    group = join(rank // 2)
    mesh = init_device_mesh("cpu", (4,))
    whole = torch.arange(24.0).view(8, 3)
    checkpoints.save({"w": distribute_tensor(whole, mesh, [Shard(0)]), "step": 7}, checkpoint_id=folder)
    state = {"w": distribute_tensor(torch.zeros(8, 3), mesh, [Shard(0)]), "step": 0}
    checkpoints.load(state, checkpoint_id=folder)
    found = state["w"].full_tensor(), state["step"], group.in_phases > 0
    dist.destroy_process_group()
    return found


def test_a_distributed_checkpoint_is_saved_and_loaded(ranks, tmp_path):
    for weights, step, phases in ranks(_checkpoint, 4, str(tmp_path / "checkpoint"), init=False):
        assert torch.equal(weights, torch.arange(24.0).view(8, 3))
        assert (step, phases) == (7, True)
