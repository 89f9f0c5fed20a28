"""Sharded data parallelism over the backend: it gathers in phases, and trains what it trains over gloo."""

from __future__ import annotations

import os

import pytest
import torch
from sharded import Blocks, settings


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
    if own_group:
        smp.shutdown()
        dist.destroy_process_group()
    return weights, phases, dist.get_backend(group) if not own_group else "smddp"


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


@pytest.mark.parametrize(("instance", "wanted"), [("ml.p4d.24xlarge", "smddp"), ("ml.g5.48xlarge", "gloo")])
def test_auto_takes_it_where_the_documentation_supports_it(ranks, instance, wanted):
    env = {"SM_CURRENT_INSTANCE_TYPE": instance}
    for _, phases, backend in ranks(_train, 4, settings(Blocks(), 4), 2, init=False, env=env):
        assert (backend, phases is not None) == (wanted, wanted == "smddp")
