"""Whole jobs of the data parallel library: from ``fit()`` to scripts that know nothing of this project."""

from __future__ import annotations

import textwrap

import pytest
from support.canaries import RELEASE
from support.platform.jobs import artifact

pytestmark = [pytest.mark.job, pytest.mark.timeout(180)]

BEGIN = """
import json, os, torch, torch.distributed as dist
torch.manual_seed(0)

def finish(seen):
    everyone = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, seen)
    if dist.get_rank() == 0:
        open(os.path.join(os.environ["SM_MODEL_DIR"], "seen.json"), "w").write(json.dumps(everyone))
"""

#: DDP and FSDP2 as their tutorials have them, and the same over gloo.
TUTORIALS = """
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("smddp")
rank, size = dist.get_rank(), dist.get_world_size()
gloo = dist.new_group(backend="gloo")

def model():
    torch.manual_seed(7)
    return nn.Sequential(nn.Linear(9, 31), nn.ReLU(), nn.Linear(31, 31), nn.ReLU(), nn.Linear(31, 5))

def gradients(net):
    x = torch.randn(4, 9, generator=torch.Generator().manual_seed(rank))
    optimizer, found = torch.optim.SGD(net.parameters(), lr=0.1), []
    for _ in range(2):
        optimizer.zero_grad()
        net(x).square().sum().backward()
        found.append([p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad.clone() for p in net.parameters()])
        optimizer.step()
    return found

def sharded(mesh):
    net = model()
    for layer in net[::2]:
        fully_shard(layer, mesh=mesh)
    return fully_shard(net, mesh=mesh)

ddp = gradients(DistributedDataParallel(model()))
fsdp = gradients(sharded(init_device_mesh("cpu", (size,))))
over_gloo = gradients(DistributedDataParallel(model(), process_group=gloo)), gradients(sharded(DeviceMesh.from_group(gloo, "cpu")))

def distance(one, other):
    return max(float((a - b).abs().max()) for x, y in zip(one, other) for a, b in zip(x, y))

group = dist.group.WORLD
dist.barrier()
names = "RANK WORLD_SIZE LOCAL_RANK SMDATAPARALLEL_LOCAL_RANK OMPI_COMM_WORLD_LOCAL_RANK MASTER_PORT SMP_HOST".split()
finish({
    "backend": dist.get_backend(), "phases": group.in_phases, "fallen": group.fallen_back,
    "ddp": distance(ddp, over_gloo[0]), "fsdp": distance(fsdp, over_gloo[1]), "both": distance(ddp, fsdp),
    "env": {name: os.environ.get(name) for name in names},
})
dist.destroy_process_group()
"""

OLDER = """
import smdistributed.dataparallel.torch.distributed as old
from smdistributed.dataparallel.torch.parallel.distributed import DistributedDataParallel as DDP
from smdistributed.dataparallel.torch.parallel import DistributedDataParallel
assert DDP is DistributedDataParallel and not old.is_initialized()
old.init_process_group()
net = DDP(torch.nn.Linear(3, 2), device_ids=[old.get_local_rank()])
net(torch.full((1, 3), float(old.get_rank()))).sum().backward()
total = torch.ones(1)
old.all_reduce(total, group=old.group.WORLD)
old.barrier()
first, swapped = torch.full((1,), float(old.get_rank())), torch.empty(4)
old.broadcast(first)
old.all_to_all_single(output_t=swapped, input_t=torch.full((4,), float(old.get_rank())))
assert first.item() == 0 and swapped.tolist() == [0, 1, 2, 3]
finish({
    "backend": dist.get_backend(), "initialized": old.is_initialized(), "rank": old.get_rank(), "size": old.get_world_size(),
    "local": old.get_local_rank(), "sum": float(total), "gradient": net.module.weight.grad[0, 0].item(),
})
"""

ACCELERATE = """
os.environ.update(ACCELERATE_TORCH_DEVICE="cpu")
from accelerate.state import PartialState
from transformers.utils import is_sagemaker_dp_enabled
assert is_sagemaker_dp_enabled()
state = PartialState(_use_sagemaker_dp=True)
total = torch.ones(1)
dist.all_reduce(total)
finish({"backend": dist.get_backend(), "accelerate": state.backend, "local": state.local_process_index, "sum": float(total)})
"""


@pytest.fixture
def data_parallel_job(tmp_path):
    """Run a script as a job of the data parallel library; gives what its ranks saw."""
    from smp_estimator import SMPEstimator

    def run(script, hosts=2, processes=2, **arguments):
        source = tmp_path / "src"
        source.mkdir(exist_ok=True)
        (source / "train.py").write_text(textwrap.dedent(BEGIN + script))
        distribution = {"smdistributed": {"dataparallel": {"enabled": True, **arguments.pop("dataparallel", {})}}}
        if processes is not None:
            distribution["mpi"] = {"enabled": True, "processes_per_host": processes}
        estimator = SMPEstimator(
            entry_point="train.py",
            source_dir=str(source),
            instance_type="local",
            instance_count=hosts,
            output_path=f"file://{tmp_path / 'out'}",
            distribution=distribution,
            **arguments,
        )
        estimator.fit(logs=False)
        return artifact(estimator, "seen.json")

    return run


@pytest.mark.full
def test_unmodified_ddp_and_fsdp2_scripts_find_the_backend_and_train_as_over_gloo(data_parallel_job):
    seen = data_parallel_job(TUTORIALS)
    assert len(seen) == 4
    for rank, one in enumerate(seen):
        assert one["backend"] == "smddp"
        assert one["phases"] > 10
        assert one["fallen"] == 0
        assert one["ddp"] == 0
        assert one["fsdp"] < 1e-6
        # FSDP2 of 2.8 trains another model over gloo than DDP does, whatever carries its all-gathers.
        assert one["both"] < 1e-5 or RELEASE <= (2, 8)
        env = one["env"]
        assert (env["RANK"], env["WORLD_SIZE"], env["LOCAL_RANK"]) == (str(rank), "4", str(rank % 2))
        assert env["SMDATAPARALLEL_LOCAL_RANK"] == env["OMPI_COMM_WORLD_LOCAL_RANK"] == env["LOCAL_RANK"]
        assert env["SMP_HOST"] == f"algo-{rank // 2 + 1}"
        assert env["MASTER_PORT"] == seen[0]["env"]["MASTER_PORT"]


@pytest.mark.full
def test_the_older_interface(data_parallel_job):
    seen = data_parallel_job(OLDER)
    assert [(one["rank"], one["local"]) for one in seen] == [(0, 0), (1, 1), (2, 0), (3, 1)]
    for one in seen:
        assert (one["backend"], one["initialized"], one["size"], one["sum"]) == ("smddp", True, 4, 4.0)
        assert one["gradient"] == pytest.approx(1.5)


@pytest.mark.full
def test_accelerate_takes_the_backend(data_parallel_job):
    pytest.importorskip("accelerate")
    seen = data_parallel_job(ACCELERATE, hosts=1)
    assert [one["local"] for one in seen] == [0, 1]
    assert all(one["backend"] == one["accelerate"] == "smddp" and one["sum"] == 2 for one in seen)


@pytest.mark.parametrize("place", ["environment", "options"])
def test_a_buffer_size_that_is_no_multiple_is_refused_before_a_rank_starts(data_parallel_job, place):
    name = "SMDDP_AG_SORT_BUFFER_SIZE_BYTES"
    given = (
        {"environment": {name: "8193"}}
        if place == "environment"
        else {"dataparallel": {"custom_mpi_options": f"-x {name}=8193"}}
    )
    with pytest.raises(Exception, match=rf"(?s){name} is 8193; it must be a positive multiple of 8192.*8192 or 16384"):
        data_parallel_job("print('never')", hosts=1, **given)
