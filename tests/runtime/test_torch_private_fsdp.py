"""The canary of what version 2 of the library takes of PyTorch's FSDP, wrappers and checkpoints; see ``test_torch_private.py``.

Most of these names are public. Here they are replaced, read by position or reached through a default, which a release may change.
"""

from __future__ import annotations

import dataclasses
import inspect

import pytest
import torch
from support.canaries import Canaries
from torch import nn

from smp_runtime.tensors import torch_private as door

CANARIES = Canaries()
of = CANARIES.of


@of("activation_wrappers")
def _(_):
    wrappers = door.activation_wrappers()
    seen = []
    for name, make in (
        ("CheckpointWrapper", wrappers.checkpoint_wrapper),
        ("OffloadWrapper", wrappers.offload_wrapper),
    ):
        kind = getattr(wrappers, name)
        forward, kind.forward = kind.forward, lambda self, *args, **kwargs: seen.append((args, kwargs))
        try:
            inner = nn.Linear(2, 2)
            wrapped = make(inner)
            wrapped(1, cache=2)
        finally:
            kind.forward = forward
        assert type(wrapped) is kind
        assert list(wrapped.children()) == [inner]
        assert next(name for name, _ in wrapped.named_parameters()).endswith("weight")
    assert seen == [((1,), {"cache": 2})] * 2


@of("name_without_wrappers")
def _(_):
    inner = door.activation_wrappers().checkpoint_wrapper(nn.Linear(2, 2))
    paths = [path for path, _ in nn.ModuleDict({"layer": inner}).named_modules()]
    assert door.name_without_wrappers(f"{paths[-1]}.weight") == "layer.weight"
    compiled = torch.compile(nn.ModuleDict({"layer": nn.Linear(2, 2)}))
    names = [door.name_without_wrappers(name) for name, _ in compiled.named_parameters()]
    assert names == ["layer.weight", "layer.bias"]


@pytest.fixture
def unit():
    """A unit of FSDP that one rank has whole."""
    import torch.distributed as dist
    from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        unit = FullyShardedDataParallel(nn.Linear(2, 2), use_orig_params=True, device_id=torch.device("cpu"))
        assert unit.sharding_strategy is ShardingStrategy.NO_SHARD
        yield unit
    finally:
        dist.destroy_process_group()


@of("lacking_gradients")
def _(request):
    unit = request.getfixturevalue("unit")
    marks, parameters = door.lacking_gradients(unit)
    assert marks == [False, False]
    assert [id(parameter) for parameter in parameters] == [id(parameter) for parameter in unit.parameters()]
    marks[1] = True
    assert door.lacking_gradients(unit)[0] == [False, True]  # FSDP's own list
    assert door.lacking_gradients(nn.Linear(2, 2)) == ([], ())


@of("free_gathered_parameters")
def _(request):
    from torch.distributed.fsdp import _runtime_utils as runtime
    from torch.distributed.fsdp._flat_param import HandleTrainingState

    assert list(inspect.signature(runtime._reshard).parameters) == ["state", "handle", "free_unsharded_flat_param"]
    unit, calls = request.getfixturevalue("unit"), []
    request.getfixturevalue("monkeypatch").setattr(runtime, "_reshard", lambda *args: calls.append(args))
    unit._handle._training_state = HandleTrainingState.BACKWARD_PRE
    door.free_gathered_parameters(unit)
    unit._handle._training_state = HandleTrainingState.IDLE
    door.free_gathered_parameters(unit)
    assert calls == [(unit, unit._handle, True)]


@of("is_outermost")
def _(request):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    request.getfixturevalue("unit")  # its group
    mesh = init_device_mesh("cpu", (1,))
    model = fully_shard(nn.Sequential(fully_shard(nn.Linear(2, 2), mesh=mesh), nn.Linear(2, 2)), mesh=mesh)
    model(torch.ones(1, 2))
    assert door.is_outermost(model)
    assert not door.is_outermost(model[0])


@of("keeps_parameters", "JOINED_PARAMETER")
def _(request):
    from torch.distributed.fsdp import _state_dict_utils as names

    assert door.keeps_parameters(request.getfixturevalue("unit"))
    assert f"{names.FSDP_PREFIX}{names.FLAT_PARAM}" == door.JOINED_PARAMETER
    assert door.name_without_wrappers(f"{names.FSDP_PREFIX}weight") == "weight"


@pytest.mark.parametrize("name", CANARIES.checks)
def test_what_pytorch_keeps_private_of_fsdp_and_wrappers_does_what_it_is_used_for(name, request):
    CANARIES.run(name, request)


#: Arguments by which version 2 calls, or is called in place of, PyTorch's functions; the first ones by position, too.
ARGUMENTS = {
    "torch.distributed.fsdp.FullyShardedDataParallel.__init__": (
        ("self", "module", "process_group", "sharding_strategy"),
        {"device_mesh", "device_id", "sync_module_states", "param_init_fn", "use_orig_params", "auto_wrap_policy"},
    ),
    "torch.distributed.fsdp.FullStateDictConfig.__init__": (("self", "offload_to_cpu", "rank0_only"), set()),
    "torch.distributed.device_mesh.DeviceMesh.from_group": (
        ("group", "device_type", "mesh"),
        {"mesh_dim_names"},
    ),
    "torch.distributed.new_group": (("ranks", "timeout", "backend"), {"use_local_synchronization"}),
    "torch.distributed.checkpoint.save": (
        ("state_dict",),
        {"checkpoint_id", "storage_writer", "planner", "process_group"},
    ),
    "torch.distributed.checkpoint.load": (
        ("state_dict",),
        {"checkpoint_id", "storage_reader", "planner", "process_group"},
    ),
    "torch.distributed.checkpoint.save_state_dict": (("state_dict",), {"process_group", "coordinator_rank"}),
    "torch.distributed.checkpoint.load_state_dict": (
        ("state_dict",),
        {"process_group", "coordinator_rank", "planner"},
    ),
    "torch.distributed.checkpoint.optimizer.load_sharded_optimizer_state_dict": (
        ("model_state_dict", "optimizer_key", "storage_reader", "planner"),
        set(),
    ),
    "torch.distributed.checkpoint.DefaultLoadPlanner.__init__": (
        ("self",),
        {"flatten_sharded_tensors", "allow_partial_load"},
    ),
    "torch.utils.checkpoint.checkpoint": (("function",), {"use_reentrant"}),
    "torch.nn.Module.register_state_dict_post_hook": (("self", "hook"), set()),
    "torch.autograd.graph.save_on_cpu.__init__": (("self", "pin_memory"), set()),
}


def _find(path):
    import importlib

    found, *names = importlib.import_module("torch"), *path.split(".")[1:]
    for depth, name in enumerate(names, 2):
        if not hasattr(found, name):
            importlib.import_module(".".join(path.split(".")[:depth]))
        found = getattr(found, name)
    return found


@pytest.mark.parametrize("path", ARGUMENTS)
def test_functions_of_pytorch_have_the_arguments_that_version_2_passes(path):
    first, more = ARGUMENTS[path]
    names = list(inspect.signature(_find(path)).parameters)
    assert tuple(names[: len(first)]) == first, f"PyTorch {torch.__version__} has other arguments of {path}"
    assert more <= set(names), f"PyTorch {torch.__version__} lacks arguments of {path}: {sorted(more - set(names))}"


def test_the_default_mesh_of_fully_shard_can_be_replaced(monkeypatch):
    from torch.distributed.fsdp import fully_shard

    function = inspect.unwrap(fully_shard)
    defaults = function.__kwdefaults__
    assert defaults["mesh"] is None
    monkeypatch.setattr(function, "__kwdefaults__", {**defaults, "mesh": "the job's"})
    with pytest.raises(Exception, match=r"str|the job's"):  # it reaches the function, which refuses it
        fully_shard(nn.Linear(2, 2))


def test_strategies_and_configurations_of_fsdp_are_those_that_version_2_reads():
    from torch.distributed.fsdp import FullStateDictConfig, FullyShardedDataParallel, ShardingStrategy, StateDictType

    hybrid = {strategy.name for strategy in ShardingStrategy if "HYBRID" in strategy.name}
    assert hybrid == {"HYBRID_SHARD", "_HYBRID_SHARD_ZERO2"}
    assert {"NO_SHARD", "FULL_SHARD"} < {strategy.name for strategy in ShardingStrategy}
    assert {"FULL_STATE_DICT", "SHARDED_STATE_DICT"} < {kind.name for kind in StateDictType}
    assert {field.name for field in dataclasses.fields(FullStateDictConfig)} == {"offload_to_cpu", "rank0_only"}
    made = FullStateDictConfig()
    object.__setattr__(made, "_smp_left_split", True)  # it takes attributes
    settings = FullyShardedDataParallel.get_state_dict_type
    assert list(inspect.signature(settings).parameters) == ["module"]


def test_plans_of_checkpoints_have_the_fields_that_version_2_changes():
    from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter, SavePlan
    from torch.distributed.checkpoint.filesystem import FileSystem

    assert "storage_data" in {field.name for field in dataclasses.fields(SavePlan)}
    for kind, names in {
        FileSystemWriter: ("reset", "set_up_storage_writer", "prepare_local_plan", "prepare_global_plan", "finish"),
        FileSystemReader: ("reset", "read_metadata", "read_data", "set_up_storage_reader", "validate_checkpoint_id"),
        FileSystem: ("create_stream", "concat_path", "rename", "mkdir", "exists", "rm_file"),
    }.items():
        assert [name for name in names if not hasattr(kind, name)] == []
