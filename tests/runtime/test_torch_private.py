"""The canary: every private name of PyTorch that the runtime uses is there and does what it is used for.

What fails here after an update of PyTorch names the release, and what ``smp_runtime/tensors/torch_private`` has to do
in another way.
"""

from __future__ import annotations

import ast
import inspect
import pickle
import threading
import weakref
from pathlib import Path
from typing import ClassVar

import pytest
import torch
from support.canaries import RELEASE, Canaries, Noting
from torch import nn

from smp_runtime.tensors import torch_private as door

CANARIES = Canaries()
of = CANARIES.of


# -- autograd ----------------------------------------------------------------------------------------------------------


@of("backward_pass")
def _(_):
    seen = []
    leaf = torch.ones(1, requires_grad=True)
    for _ in range(2):
        out = leaf * 2
        out.register_hook(lambda gradient: seen.append(door.backward_pass()))
        out.backward()
    assert door.backward_pass() == -1
    assert len(set(seen)) == 2
    assert -1 not in seen


@of("will_run")
def _(_):
    seen = []
    leaf, other = torch.ones(1, requires_grad=True), torch.ones(1, requires_grad=True)
    out = leaf * other
    node = torch.autograd.graph.get_gradient_edge(other).node
    out.register_hook(lambda gradient: seen.append(door.will_run(node)))
    torch.autograd.grad(out, leaf, retain_graph=True)
    out.backward()
    assert seen == [False, True]


@of("at_end_of_backward")
def _(_):
    seen = []
    leaf = torch.ones(1, requires_grad=True)
    leaf.register_hook(lambda gradient: seen.append("gradient"))
    out = leaf * 2
    out.register_hook(lambda gradient: door.at_end_of_backward(lambda: seen.append("end")))
    out.backward()
    assert seen == ["gradient", "end"]


@of("run_backward")
def _(_):
    leaf = torch.ones(2, requires_grad=True)
    out, ones = leaf * 3, torch.ones(2)
    edge = torch.autograd.graph.get_gradient_edge(leaf)
    found = door.run_backward((out,), (ones,), True, False, (edge,), allow_unreachable=True, accumulate_grad=False)
    assert found[0].tolist() == [3, 3]
    assert leaf.grad is None
    door.run_backward((out,), (ones,), False, False, (), allow_unreachable=True, accumulate_grad=True)
    assert leaf.grad.tolist() == [3, 3]


@of("saved_tensor_hooks")
def _(_):
    def pack(tensor):
        return tensor

    assert door.saved_tensor_hooks() is None
    if RELEASE < (2, 8) and not hasattr(torch._C._autograd, "_top_saved_tensors_default_hooks"):
        pytest.skip("an old PyTorch cannot tell; what is saved of sharded parameters is not known there")
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda packed: packed):
        assert door.saved_tensor_hooks()[0] is pack


# -- tensors -----------------------------------------------------------------------------------------------------------


class Loud(torch.Tensor):
    """Refuses what it is not asked plainly."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        raise AssertionError(f"{func} is seen")


class WithoutElements(torch.Tensor):
    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        raise AssertionError(f"{func} wants elements")


@of("DisableTorchFunctionSubclass", "make_subclass")
def _(_):
    plain = torch.ones(2)
    made = door.make_subclass(Loud, plain, True)
    with door.DisableTorchFunctionSubclass():
        assert type(made) is Loud
        assert made.requires_grad
        assert made.data_ptr() == plain.data_ptr()
    with pytest.raises(AssertionError, match="is seen"):
        made + 1


class Asked(torch.Tensor):
    """Notes the functions that take it."""

    seen: ClassVar[list] = []

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        cls.seen.append(func)
        return super().__torch_function__(func, types, args, kwargs)


@of("can_take_contents")
def _(_):
    assert door.can_take_contents(torch.ones(2), torch.ones(2, dtype=torch.float16))
    module = nn.Linear(2, 2)
    module.weight = nn.Parameter(torch.ones(2, 2).as_subclass(Asked))
    Asked.seen.clear()
    module.to(torch.float64)
    asked = Asked.seen.index(door.can_take_contents)
    assert torch.Tensor.grad.__get__ in Asked.seen[asked:]


@of("make_without_elements")
def _(_):
    made = door.make_without_elements(WithoutElements, (2, 3), dtype=torch.float64, device=torch.device("cpu"))
    assert (type(made), made.shape, made.dtype) == (WithoutElements, (2, 3), torch.float64)
    with pytest.raises(AssertionError, match="wants elements"):
        made + 1


@of("rebuild_parameter")
def _(_):
    made = door.rebuild_parameter(torch.ones(2), False, {})
    assert type(made) is nn.Parameter
    assert not made.requires_grad
    assert b"smp_runtime" not in pickle.dumps(door.rebuild_parameter)


@of("swap_contents")
def _(_):
    one, other = nn.Parameter(torch.zeros(2)), nn.Parameter(torch.ones(3, dtype=torch.float64))
    kept = weakref.ref(one)
    door.swap_contents(one, other)
    assert kept() is one
    assert (one.tolist(), one.dtype) == ([1, 1, 1], torch.float64)
    assert other.tolist() == [0, 0]


@of("storage_key")
def _(_):
    for device in ("cpu", "meta"):
        whole, another = torch.empty(4, device=device), torch.empty(4, device=device)
        assert door.storage_key(whole) == door.storage_key(whole[1:].view(3, 1)) == door.storage_key(whole.detach())
        assert door.storage_key(whole) != door.storage_key(another)
    with pytest.raises((NotImplementedError, RuntimeError)):
        door.storage_key(torch.eye(2).to_sparse())


@of("unscale")
def _(_):
    for last, overflows in ((4.0, 0.0), (float("inf"), 1.0), (float("nan"), 1.0)):
        gradients, found = [torch.tensor([2.0]), torch.tensor([last])], torch.zeros(1)
        door.unscale(gradients, found, torch.tensor([0.5]))
        assert gradients[0].item() == 1.0
        assert found.item() == overflows


@of("norms_of")
def _(_):
    half = [torch.full((2,), 300.0, dtype=torch.float16), torch.zeros(0, dtype=torch.float16)]
    assert [norm.dtype for norm in door.norms_of(half, 4.0, dtype=torch.float32)] == [torch.float32] * 2
    assert door.norms_of(half, 4.0, dtype=torch.float32)[0].item() == pytest.approx(300 * 2**0.25)
    assert door.norms_of(half[:1], float("inf"), dtype=torch.float32)[0].item() == 300


@of("values_of")
def _(_):
    twice = torch.sparse_coo_tensor([[1, 1]], [2.0, 3.0], (3,))
    door.values_of(twice).mul_(2.0)
    assert twice.to_dense().tolist() == [0.0, 10.0, 0.0]


@of("has_step_hooks")
def _(_):
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))])
    assert not door.has_step_hooks(optimizer)
    handle = optimizer.register_step_pre_hook(lambda *_: None)
    assert door.has_step_hooks(optimizer)
    handle.remove()
    assert not door.has_step_hooks(optimizer)


@of("tree_flatten", "tree_leaves", "tree_map", "tree_unflatten", "TreeSpec")
def _(_):
    tree = {"a": [1, (2, None)], "b": 3}
    leaves, structure = door.tree_flatten(tree)
    assert isinstance(structure, door.TreeSpec)
    assert leaves == door.tree_leaves(tree) == [1, 2, None, 3]
    assert door.tree_unflatten(leaves, structure) == tree
    assert door.tree_map(lambda leaf: (leaf or 0) + 1, tree) == {"a": [2, (3, 1)], "b": 4}


# -- dispatch ----------------------------------------------------------------------------------------------------------


@of("TorchDispatchMode", "dispatch_modes", "without_modes", "is_operator", "schema_of")
def _(_):
    assert door.dispatch_modes() == []
    with Noting() as outer, Noting() as inner:
        assert door.dispatch_modes() == [outer, inner]
        made = torch.ones(2)
        made.add_(1)
        with door.without_modes():
            assert door.dispatch_modes() == []
            made.mul_(2)
    assert [str(func) for func in inner.seen] == ["aten.ones.default", "aten.add_.Tensor"]
    assert all(door.is_operator(func) for func in inner.seen)
    assert not door.is_operator(len)
    factory, change = map(door.schema_of, inner.seen)
    assert any(argument.name == "device" for argument in factory.arguments)
    assert (factory.is_mutable, change.is_mutable, change.name) == (False, True, "aten::add_")
    assert door.schema_of(len) is None


@of("stay_in", "packet_of", "SHARING", "ITEM")
def _(_):
    seen = []

    def work():
        mode = Noting()
        door.stay_in(mode)
        torch.ones(2, 2).mm(torch.ones(2, 2)).sum().item()
        torch.ops.aten._unsafe_view(torch.ones(2, 2), (4,))
        seen.extend(mode.seen)

    thread = threading.Thread(target=work)  # which ends inside the mode
    thread.start()
    thread.join()
    assert door.dispatch_modes() == []
    assert door.ITEM in seen
    assert set(seen) >= door.SHARING
    assert torch.ops.aten.mm in map(door.packet_of, seen)


@of("running_node")
def _(_):
    seen = []
    leaf = torch.ones(1, requires_grad=True)
    out = leaf * 2
    out.register_hook(lambda gradient: seen.append(door.running_node()))
    out.backward()
    assert len(seen) == 1
    assert door.running_node() is None


@of("loss_reduction")
def _(_):
    outputs, targets = torch.ones(2, 3, requires_grad=True), torch.tensor([0, 1])
    for reduction in ("mean", "sum"):
        loss = nn.functional.cross_entropy(outputs, targets, reduction=reduction)
        assert door.loss_reduction(loss.grad_fn) == reduction
        assert (
            door.loss_reduction(nn.functional.mse_loss(outputs, outputs * 0, reduction=reduction).grad_fn) == reduction
        )
    assert door.loss_reduction(nn.functional.cross_entropy(outputs, targets, reduction="none").grad_fn) is None
    assert door.loss_reduction((outputs * 2).grad_fn) is None


@of("key_of_storage")
def _(_):
    tensor, other = torch.ones(3), torch.ones(3)
    assert door.key_of_storage(tensor.untyped_storage()) == door.key_of_storage(tensor[1:].untyped_storage())
    assert door.key_of_storage(tensor.untyped_storage()) != door.key_of_storage(other.untyped_storage())


@of("default_device")
def _(_):
    assert door.default_device() is None
    with torch.device("cpu"):
        assert door.default_device() == "cpu"
        with torch.device("meta"):
            assert door.default_device() == "meta"
    torch.set_default_device("meta")
    try:
        assert door.default_device() == "meta"
    finally:
        torch.set_default_device(None)
        vars(torch._GLOBAL_DEVICE_CONTEXT).pop("device_context", None)  # PyTorch 2.8 would trip over its None


# -- calls, and the compiler -------------------------------------------------------------------------------------------


@of("is_transformed")
def _(request):
    seen = []
    torch.vmap(lambda one: seen.append(door.is_transformed(one)) or one)(torch.ones(2))
    assert seen == [True]
    assert not door.is_transformed(torch.ones(2))


@of("count_function_modes", "DisableTorchFunction")
def _(request):
    seen = []

    class Mode(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            seen.append(func)
            return func(*args, **(kwargs or {}))

    assert door.count_function_modes() == 0
    with Mode():
        assert door.count_function_modes() == 1
        torch.add(1, torch.ones(1))
        assert torch.add in seen
        seen.clear()
        with door.DisableTorchFunction():
            torch.add(1, torch.ones(1))
        assert not seen


@of("taken_apart")
def _(_):
    seen = []

    class Mode(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            seen.append(func)
            return func(*args, **(kwargs or {}))

    function = torch.nn.functional.multi_head_attention_forward
    x, net = torch.randn(4, 2, 8), torch.nn.MultiheadAttention(8, 2)
    given = [x, x, x, 8, 2, net.in_proj_weight, net.in_proj_bias, None, None, False, 0.0]
    given += [net.out_proj.weight, net.out_proj.bias]
    with Mode():
        whole, _ = function(*given)
        assert function in seen
        seen.clear()
        parts, _ = door.taken_apart(function)(*given)
    assert torch.nn.functional.linear in seen
    assert function not in seen
    assert torch.equal(whole, parts)


@of("never_compiled")
def _(_):
    def doubled(x):
        return x * 2 if torch.compiler.is_compiling() else x

    def run(x):
        return doubled(x) + 1

    door.never_compiled(doubled)
    assert torch.compile(run, backend="eager")(torch.ones(1)) == 2

    def outer(x):
        return inner(x)

    def inner(x):
        return x + torch.compiler.is_compiling()

    door.never_compiled(outer, alone=True)
    assert torch.compile(outer, backend="eager")(torch.ones(1)) == 2


@of("indexing_in_transforms")
def _(_):
    with door.indexing_in_transforms():
        assert torch.vmap(lambda n: torch.arange(5)[n])(torch.tensor([3, 1])).tolist() == [3, 1]


@of("outside_transforms")
def _(_):
    def run(n):
        with door.outside_transforms():
            inside.append(float(torch.ones(2).sum()))
        return n

    inside = []
    torch.vmap(run)(torch.ones(2))
    assert inside == [2.0]


@of("compile_errors")
def _(request):
    import torch._dynamo

    def unable(graph, inputs):
        raise RuntimeError("cannot")

    with pytest.raises(door.compile_errors()):
        torch.compile(torch.cos, backend=unable)(torch.ones(1))


# -- the profiler, and what holds a GPU's memory ---------------------------------------------------------------------


@of("of_all_threads")
def _(_):
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], experimental_config=door.of_all_threads()
    ) as seen:
        thread = threading.Thread(target=lambda: torch.ones(2, 2) @ torch.ones(2, 2))
        thread.start()
        thread.join()
    assert "aten::mm" in {event.name for event in seen.events()}


@of("record_memory_history", "write_memory_history")
def _(request):
    monkeypatch = request.getfixturevalue("monkeypatch")
    called = []
    # Without a GPU they can only be asked for their arguments.
    for name in ("_record_memory_history", "_dump_snapshot"):
        taken = inspect.signature(getattr(torch.cuda.memory, name))

        def noted(*args, taken=taken, name=name, **kwargs):
            taken.bind(*args, **kwargs)
            called.append(name)

        monkeypatch.setattr(torch.cuda.memory, name, noted)
    door.record_memory_history()
    door.write_memory_history("file")
    assert called == ["_record_memory_history", "_dump_snapshot", "_record_memory_history"]


@pytest.mark.parametrize("name", CANARIES.checks)
def test_what_pytorch_keeps_private_does_what_it_is_used_for(name, request):
    CANARIES.run(name, request)


def _names_of_the_door():
    """What other files may take from it: what it defines, and what it imports under its own name."""
    for node in ast.parse(Path(door.__file__).read_text()).body:
        if isinstance(node, ast.ImportFrom):
            yield from (alias.name for alias in node.names if alias.asname == alias.name)
        elif isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            yield from (target.id for target in targets)


def _names_with_a_canary():
    for path in Path(__file__).parent.glob("test_torch_private*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "of":
                yield from map(ast.literal_eval, node.args)


def test_every_name_of_the_door_has_its_canary():
    names = {name for name in _names_of_the_door() if not name.startswith("_")}
    checked = set(_names_with_a_canary())
    assert CANARIES.checks.keys() < checked
    assert checked == names - {"IN_PLACE", "TESTED"}


def test_gradients_are_unscaled_without_the_fused_kernel(monkeypatch, request):
    monkeypatch.delattr(torch, "_amp_foreach_non_finite_check_and_unscale_")
    CANARIES.checks["unscale"](request)
