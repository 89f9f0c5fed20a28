"""Process groups beside those that a script has made itself."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from smp_runtime.comm.groups import serves


@pytest.mark.parametrize(
    ("backends", "device", "is_served"),
    [
        ("cpu:gloo,cuda:nccl", "cuda", True),
        ("cuda:nccl", "cuda", False),
        ("cpu:gloo,cuda:gloo", "cuda", True),
        ("cpu:gloo", "cuda", False),
        ("cpu:gloo", "cpu", True),
        ("cpu:mpi,cuda:mpi", "cpu", True),
    ],
)
def test_what_a_group_serves(backends, device, is_served):
    assert serves(backends, {"cpu", device}) is is_served


def test_a_script_may_have_started_groups_without_a_backend_for_the_cpu(ranks):
    def run():
        import torch.distributed as dist

        import smdistributed.modelparallel.torch as smp
        from smp_config import Group

        # As init_process_group("nccl") does on a GPU: tensors of the CPU have no backend.
        dist.init_process_group("cuda:gloo")
        try:
            session = smp.init({"ddp": True})
            assert session.groups.group(Group.WORLD) is not dist.group.WORLD
            torch.manual_seed(smp.rank())
            model = smp.DistributedModel(nn.Linear(2, 1))

            @smp.step
            def step(x):
                model.backward(model(x).sum())

            step(torch.full((1, 2), float(smp.rank())))
            smp.shutdown()
            assert dist.is_initialized()
            return model.module.weight.detach(), model.module.weight.grad
        finally:
            dist.destroy_process_group()

    for weight, gradient in (results := ranks(run, 2, init=False)):
        assert torch.equal(weight, results[0][0])
        assert gradient.tolist() == [[0.5, 0.5]]
