"""Sharded data parallelism over the backend: it gathers in phases, and trains what it trains over gloo."""

from __future__ import annotations

import os

import pytest
import torch
from support.sharded_training import Blocks, settings


def _train(config, hosts, own_group=False):
    import torch.distributed as dist

    import smdistributed.modelparallel.torch as smp
    from smp_config import Group

    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    os.environ["SMP_HOST"] = f"algo-{rank * hosts // size}"
    if own_group:  # the script starts torch.distributed itself, with a plain backend
        store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
        prefix = dist.PrefixStore("own-" + os.environ["TORCHELASTIC_RESTART_COUNT"], store)
        dist.init_process_group("gloo", store=prefix, rank=rank, world_size=size)
    session = smp.init(config)
    torch.manual_seed(0)
    model = smp.DistributedModel(Blocks())
    optimizer = smp.DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=1e-2))
    for index in range(3):
        x = torch.randn(4, 8, generator=torch.Generator().manual_seed(10 * index + rank))
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
    group = session.groups.group(Group.SHARD)
    weights, phases = model.state_dict(), getattr(group, "in_phases", None)
    backend = dist.get_backend(group)
    if own_group:
        smp.shutdown()
        dist.destroy_process_group()
    return weights, phases, backend


def test_it_trains_the_same_and_gathers_in_phases(ranks):
    config = settings(Blocks(), 4)
    over_gloo = ranks(_train, 4, {**config, "ddp_dist_backend": "gloo"}, 2, init=False)
    for own_group in (False, True):
        over_smddp = ranks(_train, 4, {**config, "ddp_dist_backend": "smddp"}, 2, own_group, init=False)
        for (weights, phases, backend), (expected, none, plain) in zip(over_smddp, over_gloo, strict=True):
            assert (backend, plain, none) == ("smddp", "gloo", None)
            assert phases > 30
            for name, value in weights.items():
                torch.testing.assert_close(value, expected[name], atol=1e-6, rtol=1e-5)


def _train_and_count(config):
    """Train with small buffers; gives also how many gathers went in two phases outside the backend."""
    from smp_runtime.sharding import all_gather as gathering

    calls = []
    second = gathering.BackendGathering.second
    gathering.BackendGathering.second = lambda self, *given: calls.append(1) or second(self, *given)
    try:
        return (*_train(config, 2), len(calls))
    finally:
        gathering.BackendGathering.second = second


def test_units_larger_than_the_buffers_still_go_in_two_phases(ranks):
    config = settings(Blocks(), 4)
    over_gloo = ranks(_train, 4, {**config, "ddp_dist_backend": "gloo"}, 2, init=False)
    env = {"SMDDP_AG_SCRATCH_BUFFER_SIZE_BYTES": "8192", "SMDDP_AG_SORT_BUFFER_SIZE_BYTES": "8192"}
    config["ddp_dist_backend"] = "smddp"
    for hierarchical in (True, False):
        config["sdp_hierarchical_allgather"] = hierarchical
        found = ranks(_train_and_count, 4, config, init=False, env=env)
        for (weights, phases, backend, calls), (expected, _, _) in zip(found, over_gloo, strict=True):
            assert backend == "smddp"
            assert phases > 5  # the small units
            assert (calls > 10) == hierarchical
            for name, value in weights.items():
                torch.testing.assert_close(value, expected[name], atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize(("instance", "wanted"), [("ml.p4d.24xlarge", "smddp"), ("ml.g5.48xlarge", "gloo")])
def test_auto_takes_it_where_the_documentation_supports_it(ranks, instance, wanted):
    env = {"SM_CURRENT_INSTANCE_TYPE": instance}
    for _, phases, backend in ranks(_train, 4, settings(Blocks(), 4), 2, init=False, env=env):
        assert (backend, phases is not None) == (wanted, wanted == "smddp")


def _init_on_instances(config, instances):
    import torch.distributed as dist

    import smdistributed.modelparallel.torch as smp

    rank = int(os.environ["RANK"])
    os.environ.update(SMP_HOST=f"algo-{rank // 2}", SM_CURRENT_INSTANCE_TYPE=instances[rank // 2])
    smp.init(config)
    return dist.get_backend()


def test_hosts_of_different_types_agree_on_the_plain_backend(ranks):
    instances = ("ml.p4d.24xlarge", "ml.g5.48xlarge")
    config = settings(Blocks(), 4)
    assert ranks(_init_on_instances, 4, config, instances, init=False) == ["gloo"] * 4
