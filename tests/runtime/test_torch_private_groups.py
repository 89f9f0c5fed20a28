"""The canary of what PyTorch keeps private of process groups; see ``test_torch_private.py``."""

from __future__ import annotations

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from support.canaries import RELEASE, Canaries

from smp_runtime.tensors import torch_private as door

CANARIES = Canaries()
of = CANARIES.of


def gloo(tmp_path):
    return dist.ProcessGroupGloo(dist.FileStore(str(tmp_path / "gloo"), 1), 0, 1, timeout=timedelta(seconds=20))


@of("absent_store", "group_of_operation")
def _(_):
    arguments = []

    class Look(door.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            arguments.extend(args)
            return func(*args, **(kwargs or {}))

    dist.init_process_group("fake", store=door.absent_store(), rank=1, world_size=1000)
    try:
        group = dist.new_group([1, 7, 9])
        with Look():
            dist.all_reduce(torch.ones(1), group=group)
        found = [one for one in map(door.group_of_operation, arguments) if one is not None]
        assert [one.size() for one in found] == [3]
        assert door.group_of_operation(group.group_name).size() == 3
        assert door.group_of_operation("no group") is None
    finally:
        dist.destroy_process_group()


@of("default_store")
def _(request):
    request.getfixturevalue("group")
    store = door.default_store()
    store.set("asked", "yes")
    assert store.get("asked") == b"yes"
    assert dist.PrefixStore("other", store).num_keys() >= 0


@of("abort_process_groups")
def _(request):
    request.getfixturevalue("group")
    door.abort_process_groups()
    assert not dist.is_initialized() or RELEASE < (2, 8)  # the first releases that have it abort NCCL alone


@of("give_backends", "name_group", "count_collectives", "all_gather_single", "all_gather_single_coalesced")
def _(request):
    group, backend = dist.ProcessGroup(0, 1), gloo(request.getfixturevalue("tmp_path"))
    door.count_collectives(backend)
    kind = dist.ProcessGroup.BackendType.GLOO
    door.give_backends(group, {"cpu": (kind, backend)}, kind)
    door.name_group(group, "canary")
    assert group.group_name == "canary"
    output = torch.zeros(2)
    door.all_gather_single(group, output, torch.ones(2)).wait()
    assert output.tolist() == [1, 1]
    outputs = [torch.zeros(2), torch.zeros(1)]
    door.all_gather_single_coalesced(group, outputs, [torch.full((2,), 2.0), torch.full((1,), 3.0)]).wait()
    assert [each.tolist() for each in outputs] == [[2, 2], [3]]


@of("timeout_of", "set_timeout")
def _(request):
    backend = gloo(request.getfixturevalue("tmp_path"))
    assert door.timeout_of(backend) == timedelta(seconds=20)
    options = dist.ProcessGroupGloo._Options()
    door.set_timeout(options, timedelta(seconds=7))
    assert options._timeout == timedelta(seconds=7)


@pytest.mark.parametrize("name", CANARIES.checks)
def test_what_pytorch_keeps_private_of_process_groups_does_what_it_is_used_for(name, request):
    CANARIES.run(name, request)
