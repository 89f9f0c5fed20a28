"""Sharded data parallelism over the backend: it gathers in phases, and trains what it trains over gloo."""

from __future__ import annotations

import os

import pytest
import torch
from support.training.sharded_training import Blocks, settings

from smp_config import Group


def _train(config, hosts, own_group=False):
    import torch.distributed as dist

    import smdistributed.modelparallel.torch as smp

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
    share = phases and group.bytes_in_phases / (group.bytes_in_phases + group.bytes_fallen_back)
    backend = dist.get_backend(group)
    if own_group:
        smp.shutdown()
        dist.destroy_process_group()
    return weights, phases, backend, share


def test_it_trains_the_same_and_gathers_in_phases(ranks):
    config = settings(Blocks(), 4)
    over_gloo = ranks(_train, 4, {**config, "ddp_dist_backend": "gloo"}, 2, init=False)
    for own_group in (False, True):
        over_smddp = ranks(_train, 4, {**config, "ddp_dist_backend": "smddp"}, 2, own_group, init=False)
        for (weights, phases, backend, share), (expected, none, plain, _) in zip(over_smddp, over_gloo, strict=True):
            assert (backend, plain, none) == ("smddp", "gloo", None)
            assert phases > 30
            assert share == 1.0
            for name, value in weights.items():
                torch.testing.assert_close(value, expected[name], atol=1e-6, rtol=1e-5)


def _train_and_count(config):
    """Train with small buffers; gives also the bytes that this rank sent to the other host, and those that it had to."""
    from smp_runtime.smddp.messages import MessageGather
    from smp_runtime.smddp.process_group import SmddpProcessGroup

    here, crossed, wanted = int(os.environ["RANK"]) // 2, [], []
    made, asked = MessageGather.__init__, SmddpProcessGroup.gather_in_pieces

    class Counting:
        def __init__(self, backend):
            self.recv = backend.recv
            self._send = backend.send

        def send(self, tensors, to, tag):
            if to // 2 != here:
                crossed.append(sum(tensor.nbytes for tensor in tensors))
            return self._send(tensors, to, tag)

    def gather(self, full, shard):
        wanted.append(shard.nbytes)
        return asked(self, full, shard)

    MessageGather.__init__ = lambda self, backend, *given: made(self, Counting(backend), *given)
    SmddpProcessGroup.gather_in_pieces = gather
    try:
        return (*_train(config, 2), crossed, wanted)
    finally:
        MessageGather.__init__, SmddpProcessGroup.gather_in_pieces = made, asked


@pytest.mark.parametrize(
    "half", [None, pytest.param("bf16", marks=pytest.mark.full), pytest.param("fp16", marks=pytest.mark.full)]
)
def test_units_larger_than_the_buffers_go_through_them_in_pieces(ranks, half):
    """The largest unit's shard is more than 8 KiB, half of that in half precision; a piece has at most 2 KiB."""
    config = settings(Blocks(), 4, **({half: True} if half else {}))
    over_gloo = ranks(_train, 4, {**config, "ddp_dist_backend": "gloo"}, 2, init=False)
    env = {"SMDDP_AG_SCRATCH_BUFFER_SIZE_BYTES": "8192", "SMDDP_AG_SORT_BUFFER_SIZE_BYTES": "8192"}
    config["ddp_dist_backend"] = "smddp"
    for hierarchical in (True, False):
        config["sdp_hierarchical_allgather"] = hierarchical
        found = ranks(_train_and_count, 4, config, init=False, env=env)
        for (weights, phases, backend, share, crossed, wanted), (expected, *_) in zip(found, over_gloo, strict=True):
            assert backend == "smddp"
            assert phases > 1.5 * len(wanted)  # the small units go in one piece
            assert share == 1.0
            assert sum(wanted) <= sum(crossed) <= 1.02 * sum(wanted)
            for name, value in weights.items():
                torch.testing.assert_close(value, expected[name], atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize(("instance", "wanted"), [("ml.p4d.24xlarge", "smddp"), ("ml.g5.48xlarge", "gloo")])
def test_auto_takes_it_where_the_documentation_supports_it(ranks, instance, wanted):
    env = {"SM_CURRENT_INSTANCE_TYPE": instance}
    for _, phases, backend, _ in ranks(_train, 4, settings(Blocks(), 4), 2, init=False, env=env):
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


def _save_or_load(folder, config, saves):
    """Train what is created late and save it, or load that; gives weights and optimizer state."""
    import smdistributed.modelparallel.torch as smp

    os.environ["SMP_HOST"] = f"algo-{int(os.environ['RANK']) // 2}"
    session = smp.init(config)
    torch.manual_seed(0)
    with smp.model_creation():
        module = Blocks()
    model = smp.DistributedModel(module)
    optimizer = smp.DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=1e-2))
    if saves:
        for index in range(2):
            optimizer.zero_grad()
            model(torch.randn(4, 8, generator=torch.Generator().manual_seed(index))).square().mean().backward()
            optimizer.step()
        smp.save_checkpoint(folder, "now", partial=True, model=model, optimizer=optimizer)
    else:
        smp.resume_from_checkpoint(folder, partial=True)
    state = optimizer.state_dict()["state"]
    moments = [value for _, values in sorted(state.items()) for value in values.values()]
    return model.state_dict(), moments, getattr(session.groups.group(Group.SHARD), "bytes_fallen_back", None)


@pytest.mark.full
def test_late_creation_and_a_checkpoint_through_pieces_load_at_another_degree(ranks, tmp_path):
    env = {"SMDDP_AG_SCRATCH_BUFFER_SIZE_BYTES": "8192", "SMDDP_AG_SORT_BUFFER_SIZE_BYTES": "8192"}
    late = {"delayed_parameter_initialization": True, "bf16": True}
    config = settings(Blocks(), 4, ddp_dist_backend="smddp", **late)
    folder = str(tmp_path / "saved")
    (weights, moments, fallen), *_ = ranks(_save_or_load, 4, folder, config, True, init=False, env=env)
    assert fallen == 0
    for world, degree in ((2, 2), (4, 2), (1, 1)):
        other = settings(Blocks(), degree, **late) if degree > 1 else {"bf16": True}
        for found, state, _ in ranks(_save_or_load, world, folder, other, False, init=False):
            for name, value in weights.items():
                assert torch.equal(found[name], value), name
            assert len(state) == len(moments)
            for one, two in zip(state, moments, strict=True):
                assert torch.equal(torch.as_tensor(one), torch.as_tensor(two))
