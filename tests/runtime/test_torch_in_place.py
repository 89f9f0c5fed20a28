"""The canary of private names of PyTorch that the runtime uses where they stand, as every subclass of a module does.

They are listed in ``IN_PLACE`` of ``smp_runtime/tensors/torch_private``.
"""

from __future__ import annotations

import inspect

import pytest
import torch
import torch.distributed as dist
from support.canaries import RELEASE, Canaries, Doubling, Noting
from torch import nn

from smp_runtime.optim.clipping import wrapped_function
from smp_runtime.tensors import torch_private as door

CANARIES = Canaries()
of = CANARIES.of


@of("torch.nn.Module._parameters", "torch.nn.Module._buffers", "torch.nn.Module._modules")
def _(_):
    module = nn.Sequential(nn.BatchNorm1d(2))
    assert module._modules == {"0": module[0]}
    assert list(module[0]._parameters) == ["weight", "bias"]
    assert module[0]._buffers["running_mean"] is module[0].running_mean
    module[0]._parameters["weight"] = None
    assert dict(module.named_parameters()).keys() == {"0.bias"}


@of(
    *(f"torch.nn.Module._{kind}_hooks" for kind in ("forward", "forward_pre", "backward", "backward_pre")),
    *(f"torch.Tensor._{kind}_hooks" for kind in ("backward", "post_accumulate_grad")),
)
def _(_):
    module, tensor = Doubling(), torch.ones(1, requires_grad=True)
    for name, register in {
        "_forward_hooks": module.register_forward_hook,
        "_forward_pre_hooks": module.register_forward_pre_hook,
        "_backward_hooks": module.register_full_backward_hook,
        "_backward_pre_hooks": module.register_full_backward_pre_hook,
    }.items():
        register(print)
        assert list(getattr(module, name).values()) == [print]
    tensor.register_hook(print)
    tensor.register_post_accumulate_grad_hook(print)
    assert list(tensor._backward_hooks.values()) == list(tensor._post_accumulate_grad_hooks.values()) == [print]


@of("torch.nn.Module._maybe_warn_non_full_backward_hook")
def _(_):
    seen, module, given = [], nn.Linear(2, 2), torch.ones(1, 2)
    original = nn.Module._maybe_warn_non_full_backward_hook
    nn.Module._maybe_warn_non_full_backward_hook = lambda *given: seen.extend(given)
    try:
        module.register_backward_hook(print)
        result = module(given)
    finally:
        nn.Module._maybe_warn_non_full_backward_hook = original
    assert seen[0] is module
    assert seen[1][0] is given
    assert seen[2] is result


@of("torch.nn.Module._apply", "torch.nn.Module._load_from_state_dict")
def _(_):
    class Overriding(nn.Linear):
        seen = ()

        def _apply(self, fn, recurse=True):
            self.seen += ("apply",)
            return super()._apply(fn, recurse)

        def _load_from_state_dict(self, state_dict, prefix, *args):
            self.seen += (prefix,)
            super()._load_from_state_dict(state_dict, prefix, *args)

    model = nn.Sequential(Overriding(1, 1))
    model.double().load_state_dict(model.state_dict())
    assert model[0].seen == ("apply", "0.")
    assert model[0].weight.dtype is torch.float64


@of(*(f"torch.nn.Module._{kind}call_impl" for kind in ("", "compiled_", "wrapped_")))
def _(_):
    module = Doubling()
    vars(module)["_call_impl"] = lambda value: "taken"
    vars(module)["_compiled_call_impl"] = None
    assert module(1) == door.call_with_hooks(module, 1) == "taken"
    del vars(module)["_call_impl"]
    assert module(1) == type(module)._call_impl(module, 1) == 2
    assert nn.Module.__call__.__name__ == "_wrapped_call_impl"


@of("torch.distributed.fsdp.FullyShardedDataParallel._optim_state_dict_impl")
def _(_):
    from torch.distributed.fsdp import FullyShardedDataParallel

    gather = vars(FullyShardedDataParallel)["_optim_state_dict_impl"]
    assert isinstance(gather, staticmethod)
    assert inspect.signature(gather.__func__).parameters["cpu_offload"].default is True


@of("torch.Tensor._base")
def _(_):
    tensor = torch.zeros(4)
    assert tensor._base is None
    assert tensor.view(2, 2)[1]._base is tensor


@of("torch.Tensor._version")
def _(_):
    tensor = torch.ones(2)
    before = tensor._version
    tensor[:1].add_(1)
    assert tensor._version == before + 1


@of("torch._foreach_add_")
def _(_):
    tensors = [torch.ones(1), torch.zeros(2)]
    torch._foreach_add_(tensors, 1.0)
    assert [tensor.tolist() for tensor in tensors] == [[2.0], [1.0, 1.0]]


@of("torch._foreach_clamp_min_", "torch._foreach_clamp_max_")
def _(_):
    tensors = [torch.tensor([-3.0, 3.0]), torch.tensor([1.0, 0.5])]
    torch._foreach_clamp_min_(tensors, -1.0)
    torch._foreach_clamp_max_(tensors, 0.75)
    assert [tensor.tolist() for tensor in tensors] == [[-1.0, 0.75], [0.75, 0.5]]


@of("torch._foreach_mul_", "torch._foreach_copy_")
def _(_):
    tensors = [torch.ones(1), torch.ones(2)]
    torch._foreach_mul_(tensors, 3.0)
    assert [each.tolist() for each in tensors] == [[3], [3, 3]]
    torch._foreach_copy_(tensors, [torch.ones(1, dtype=torch.float16), torch.full((2,), 4, dtype=torch.float64)])
    assert [each.tolist() for each in tensors] == [[1], [4, 4]]


@of("torch.ops.aten._local_scalar_dense", "torch.ops.aten._embedding_bag", "torch.ops.aten._to_copy")
def _(_):
    with Noting() as noting:
        torch.ones(1).to("meta")
        torch.ones(()).item()
        nn.functional.embedding_bag(torch.zeros(1, 1, dtype=torch.int64), torch.ones(1, 1))
    packets = [func.overloadpacket for func in noting.seen]
    assert {torch.ops.aten._local_scalar_dense, torch.ops.aten._to_copy} <= set(packets)
    assert torch.ops.aten._embedding_bag in packets or torch.ops.aten._embedding_bag_forward_only in packets


@of(
    *("torch.amp.GradScaler._unscale_grads_", "torch.amp.GradScaler._maybe_opt_step", "torch.amp.GradScaler._enabled"),
    *("torch.amp.GradScaler._scale", "torch.amp.GradScaler._lazy_init_scale_growth_tracker"),
)
def _(_):
    class Overriding(torch.amp.GradScaler):
        seen = ()

        def _unscale_grads_(self, optimizer, *args, **kwargs):
            self.seen += ("unscale",)
            return super()._unscale_grads_(optimizer, *args, **kwargs)

        def _maybe_opt_step(self, optimizer, optimizer_state, *args, **kwargs):
            self.seen += tuple(found.item() for found in optimizer_state["found_inf_per_device"].values())
            return super()._maybe_opt_step(optimizer, optimizer_state, *args, **kwargs)

    scaler, parameter = Overriding("cpu", init_scale=4.0), nn.Parameter(torch.ones(1))
    assert scaler._enabled
    assert scaler._scale is None
    scaler._lazy_init_scale_growth_tracker(torch.device("cpu"))
    assert scaler._scale.item() == 4.0
    scaler.scale(parameter.sum()).backward()
    scaler.step(torch.optim.SGD([parameter], lr=0.5))
    assert scaler.seen == ("unscale", 0.0)
    assert parameter.item() == 0.5


@of("torch.distributed.ProcessGroup._allgather_base", "torch.distributed.ProcessGroup._reduce_scatter_base")
def _(request):
    class Overriding(dist.ProcessGroup):
        def getBackendName(self):  # noqa: N802 - the name that PyTorch calls
            return "canary"

        def gather(self, output, *args):
            output.fill_(1)
            return done()

        def scatter(self, output, *args):
            output.fill_(2)
            return done()

        _allgather_base = all_gather_single = gather
        _reduce_scatter_base = reduce_scatter_single = scatter

    def done():
        future = torch.futures.Future()
        future.set_result(None)
        return torch._C._distributed_c10d._create_work_from_future(future)

    group, output = Overriding(0, 1), torch.zeros(1)
    request.getfixturevalue("group")
    dist.distributed_c10d._world.pg_map[group] = ("canary", None)
    dist.distributed_c10d._world.pg_names[group] = "canary"
    dist.distributed_c10d._world.pg_group_ranks[group] = {0: 0}
    dist.all_gather_into_tensor(output, torch.zeros(1), group=group)
    assert output.item() == 1
    dist.reduce_scatter_tensor(output, torch.zeros(1), group=group)
    assert output.item() == 2


@of("torch.nn.utils.clip_grad._clip_grads_with_norm_", "torch.nn.utils.clip_grad._get_total_norm")
def _(_):
    from torch.nn.utils import clip_grad

    parameter = nn.Parameter(torch.ones(1))
    parameter.grad = torch.full((1,), 4.0)
    if RELEASE < (2, 6):  # then what the public function wraps is replaced
        assert not hasattr(clip_grad, "_get_total_norm")
        cell = wrapped_function(clip_grad.clip_grad_norm_)
        original, seen = cell.cell_contents, []
        cell.cell_contents = lambda *args: seen.append(args) or original(*args)
        try:
            torch.nn.utils.clip_grad_norm_([parameter], 1.0)
        finally:
            cell.cell_contents = original
        assert seen == [([parameter], 1.0)]
        assert float(parameter.grad) == pytest.approx(1.0)
        return
    seen, originals = [], (clip_grad._get_total_norm, clip_grad._clip_grads_with_norm_)
    clip_grad._get_total_norm = lambda *args: seen.append(args) or originals[0](*args)
    clip_grad._clip_grads_with_norm_ = lambda *args: seen.append(args) or originals[1](*args)
    try:
        norm = torch.nn.utils.clip_grad_norm_([parameter], 1.0)
    finally:
        clip_grad._get_total_norm, clip_grad._clip_grads_with_norm_ = originals
    (_, *measured), (parameters, limit, total, _) = seen
    assert measured == [2.0, False, None]
    assert (parameters, limit) == ([parameter], 1.0)
    assert total is norm  # what is written there is what the caller gets


@of(*(f"torch.ops.aten.{name}" for name in ("_fused_sdp_choice", *door.in_place._ATTENTION)))
def _(request):
    name = request.node.callspec.params["name"].rpartition(".")[2]
    found = [argument.name for argument in getattr(torch.ops.aten, name).default._schema.arguments]
    head = ["query", "key", "value"]
    if not name.endswith("_backward"):
        assert found[:3] == head
        return
    assert found[0].startswith("grad_out")
    place = found.index("out")
    assert found[1:4] == head
    assert found[place : place + 2] == ["out", "logsumexp"]
    assert {"is_causal", "scale", "dropout_p"} <= set(found)


@of("torch.utils.checkpoint._CheckpointFrame")
def _(_):
    frame = torch.utils.checkpoint._CheckpointFrame
    if not hasattr(frame, "save_inputs"):  # of before: a function keeps them, which sequences refuse by name
        assert issubclass(torch.utils.checkpoint._NoopSaveInputs, torch.autograd.Function)
        return
    kept, originals = [], (frame.save_inputs, frame.get_inputs)
    frame.save_inputs = lambda self, *args: kept.append(args) or originals[0](self, *args)
    frame.get_inputs = lambda self: [(value.detach() * 2).requires_grad_() for value in originals[1](self)]
    try:
        one = torch.ones(1, requires_grad=True)
        torch.utils.checkpoint.checkpoint(torch.square, one, use_reentrant=False).backward()
    finally:
        frame.save_inputs, frame.get_inputs = originals
    assert kept[0][-1] is one
    assert float(one.grad) == 4.0  # of the value that the method has returned


# ----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CANARIES.checks)
def test_what_is_used_in_place_does_what_it_is_used_for(name, request):
    CANARIES.run(name, request)


def test_every_name_that_is_used_in_place_has_its_canary():
    assert CANARIES.checks.keys() == {f"{owner}.{name}" for owner, names in door.IN_PLACE.items() for name in names}
