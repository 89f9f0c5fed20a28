"""PyTorch's private names: the runtime takes each from here, under a public name of this module.

A release may rename or drop any of them. A missing name has a fallback here, or fails at its first use with an
error that names the release; the rest of the runtime works. ``tests/runtime/test_torch_private.py`` tries
each. So after an update it shows which function here has to be fixed.

A few names stay where they are used, :data:`IN_PLACE`: those that a subclass overrides or that every author
of modules knows, for which a function would only hide what happens. The same tests try them.
"""

# ruff: noqa: SLF001 - this file is the place for private names

from __future__ import annotations

import contextlib
import importlib
import os
import sys
import types
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode
from torch.utils._pytree import TreeSpec as TreeSpec
from torch.utils._pytree import tree_flatten as tree_flatten
from torch.utils._pytree import tree_leaves as tree_leaves
from torch.utils._pytree import tree_map as tree_map
from torch.utils._pytree import tree_unflatten as tree_unflatten

from smp_runtime.errors import SMPRuntimeError

#: The oldest and the newest release that all tests of the runtime run with. setup.cfg lists the limits of older ones.
TESTED = ("2.8", "2.15")

_FUSED = ("flash_attention", "flash_attention_for_cpu", "efficient_attention", "cudnn_attention")
_ATTENTION = tuple(f"_scaled_dot_product_{kind}{way}" for kind in _FUSED for way in ("", "_backward"))

#: Private names that other files use directly, by their owner.
IN_PLACE: Mapping[str, tuple[str, ...]] = {
    # Contents of a module. named_parameters and similar methods read these dictionaries.
    "torch.nn.Module": (
        *("_parameters", "_buffers", "_modules"),
        *("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks"),
        # Overridden, as PyTorch's own modules do.
        *("_apply", "_load_from_state_dict"),
        # Put on an instance, so that they take its calls; names that a checkpointed function may have.
        *("_call_impl", "_compiled_call_impl", "_wrapped_call_impl"),
    ),
    # How often a tensor was changed in place, what a view is of, and what hangs on it.
    "torch.Tensor": ("_version", "_base", "_backward_hooks", "_post_accumulate_grad_hooks"),
    # One kernel for many tensors; torch.optim is written with these.
    "torch": ("_foreach_add_", "_foreach_mul_", "_foreach_copy_", "_foreach_clamp_min_", "_foreach_clamp_max_"),
    # Operators. Their names are part of the format of exported programs.
    "torch.ops.aten": ("_local_scalar_dense", "_embedding_bag", "_to_copy", "_fused_sdp_choice", *_ATTENTION),
    # Overridden, and asked whether it has begun.
    "torch.amp.GradScaler": (
        *("_unscale_grads_", "_maybe_opt_step", "_enabled", "_scale", "_lazy_init_scale_growth_tracker"),
    ),
    # Overridden: names of before PyTorch 2.13.
    "torch.distributed.ProcessGroup": ("_allgather_base", "_reduce_scatter_base"),
    "torch.utils.checkpoint": ("_CheckpointFrame",),  # keeps the inputs of a checkpointed function
    "torch.distributed.fsdp.FullyShardedDataParallel": ("_optim_state_dict_impl",),  # wrong on a CPU: replaced
    # Replaced if gradients lie on several ranks. Before PyTorch 2.6, the function that the public one wraps is replaced.
    "torch.nn.utils.clip_grad": ("_get_total_norm", "_clip_grads_with_norm_"),
}


def _private(purpose: str, *paths: str) -> Any:
    """Return the first of ``paths`` that torch has, or else a function that raises an error when called."""
    for path in paths:
        found: Any = torch
        for name in path.split("."):
            found = getattr(found, name, None)
        if found is not None:
            return found

    def missing(*args: Any, **kwargs: Any) -> Any:
        raise SMPRuntimeError(
            f"PyTorch {torch.__version__} has no torch.{paths[0]}, by which the runtime {purpose}; the runtime is tested with "
            f"PyTorch {TESTED[0]} to {TESTED[1]}: install one of these"
        )

    return missing


# -- autograd ----------------------------------------------------------------------------------------------------------

#: The number of the backward pass that the calling thread runs a part of; -1 outside one.
backward_pass: Callable[[], int] = _private("tells backward passes apart", "_C._current_graph_task_id")

#: Whether the running backward pass will run a node of the graph; inside a backward pass only.
will_run: Callable[[Any], bool] = _private(
    "learns whether backward accumulates into parameters", "_C._will_engine_execute_node"
)

#: Call a function without arguments at the end of the running backward pass; inside one only.
at_end_of_backward: Callable[[Callable[[], object]], None] = _private(
    "acts at the end of a backward pass", "autograd.Variable._execution_engine.queue_callback"
)

#: ``torch.autograd.backward`` and ``grad`` without checks, which cost as much as a small module's backward pass: ``(outputs,
#: gradients, retain_graph, create_graph, inputs, allow_unreachable=…, accumulate_grad=…)``, tuples all three.
run_backward: Callable[..., tuple[torch.Tensor | None, ...]] = _private(
    "runs backward of one stage", "autograd.Variable._execution_engine.run_backward"
)


def saved_tensor_hooks() -> tuple[Callable[..., Any], Callable[..., Any]] | None:
    """Return the calling thread's innermost saved-tensor hooks; None also if PyTorch cannot report them, as in 2.4."""
    top = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)
    hooks: tuple[Callable[..., Any], Callable[..., Any]] | None = None if top is None else top(True)
    return hooks


def is_transformed(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is one inside ``torch.func`` (``vmap``, ``grad``, …)."""
    known = getattr(getattr(torch._C, "_functorch", None), "is_functorch_wrapped_tensor", None)
    return bool(known and known(tensor))


def taken_apart(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a copy of a Python function of PyTorch that modes do not see, although they see the calls inside it."""
    names = {**function.__globals__, "has_torch_function": lambda tensors: False}
    made = types.FunctionType(function.__code__, names, function.__name__, function.__defaults__, function.__closure__)
    made.__kwdefaults__ = function.__kwdefaults__
    return made


# -- tensors -----------------------------------------------------------------------------------------------------------

#: A context in which functions see subclasses of tensors as plain ones.
DisableTorchFunctionSubclass = torch._C.DisableTorchFunctionSubclass

#: A context in which neither modes nor subclasses of tensors take functions.
DisableTorchFunction = torch._C.DisableTorchFunction


def compile_errors() -> tuple[type[BaseException], ...]:
    """Return the errors that a compiled function raises if it cannot be compiled; empty without the compiler."""
    kinds = sys.modules.get("torch._dynamo.exc")
    return () if kinds is None else (kinds.TorchDynamoException,)


def never_compiled(function: Any, *, alone: bool = False) -> Any:
    """Let ``torch.compile`` run a function as it is, and unless ``alone`` all that it calls; this has no cost per call."""
    frames: Any = getattr(getattr(torch._C, "_dynamo", None), "eval_frame", None)
    if hasattr(frames, "set_code_exec_strategy"):
        actions = (frames._FrameAction.SKIP, frames._FrameAction.DEFAULT if alone else frames._FrameAction.SKIP)
        frames.set_code_exec_strategy(function.__code__, frames._FrameExecStrategy(*actions))
    function._torchdynamo_disable = not alone
    return function


def indexing_in_transforms() -> contextlib.AbstractContextManager[Any]:
    """Return a context in which numbers inside ``vmap`` may be indices, as in functions for ``flex_attention``."""
    operations: Any = importlib.import_module("torch._dynamo._trace_wrapped_higher_order_op")
    return operations.TransformGetItemToIndex()


#: A context that ``vmap`` and the other transforms do not reach.
outside_transforms: Any = _private("gathers in vmap", "_functorch.pyfunctorch.temporarily_clear_interpreter_stack")

#: ``(class, tensor, requires_grad)``: a tensor of a subclass that shares the elements of another.
make_subclass: Callable[..., Any] = _private("makes stand-ins for tensors of other stages", "Tensor._make_subclass")

#: ``(one, other)``: whether ``one.data = other`` can be set; what ``nn.Module.to`` asks of each parameter.
can_take_contents: Callable[[torch.Tensor, torch.Tensor], bool] = _private(
    "moves modules whose parameters were replaced", "_has_compatible_shallow_copy_type"
)

#: ``(class, shape, dtype=…, device=…)``: a tensor of a subclass without elements.
make_without_elements: Callable[..., Any] = _private("makes handles of remote tensors", "Tensor._make_wrapper_subclass")

#: What pickles of parameters call when they are read; pickled by PyTorch's name, so that they need no package of ours.
rebuild_parameter: Callable[..., nn.Parameter] = _private("pickles stand-ins", "_utils._rebuild_parameter")

_swap_in_place: Callable[[torch.Tensor, torch.Tensor], None] = _private(
    "gives a parameter that a recurrent layer refers to another content", "_C._swap_tensor_impl"
)


def swap_contents(one: torch.Tensor, other: torch.Tensor) -> None:
    """Swap values, device, type and gradients of two tensors; both keep their identity for code that refers to them.

    Unlike ``torch.utils.swap_tensors`` it also swaps parameters with weak references, as recurrent layers have them.

    Raises:
        RuntimeError: an autograd graph or a view holds one of them.
    """
    # A parameter that was frozen after its use is held by that graph; swap_tensors looks only at those that require gradients.
    is_held = one.is_leaf and not one.requires_grad and one._use_count() > 1  # type: ignore[attr-defined]
    if not weakref.getweakrefs(one):
        with _requiring_gradients(one if is_held else None, other):
            torch.utils.swap_tensors(one, other)
    else:
        one.__class__, other.__class__ = other.__class__, one.__class__
        one.__dict__, other.__dict__ = other.__dict__, one.__dict__
        _swap_in_place(one, other)
    for tensor in (one, other):
        set_gradient_hooks(tensor, *gradient_hooks(tensor))


@contextlib.contextmanager
def _requiring_gradients(held: torch.Tensor | None, other: torch.Tensor) -> Iterator[None]:
    """Let a frozen tensor require gradients until its contents are those of ``other``."""
    if held is None or not (held.is_floating_point() or held.is_complex()):
        yield
        return
    with DisableTorchFunctionSubclass():
        frozen = held.requires_grad_(True)
        try:
            yield
            frozen = other
        finally:
            frozen.requires_grad_(False)


def gradient_hooks(tensor: torch.Tensor) -> tuple[dict[int, Any] | None, dict[int, Any] | None]:
    """Return the dictionaries of ``register_hook`` and ``register_post_accumulate_grad_hook``; None if never used."""
    with DisableTorchFunctionSubclass():
        return tensor._backward_hooks, tensor._post_accumulate_grad_hooks


def set_gradient_hooks(tensor: torch.Tensor, computed: dict[int, Any] | None, added: dict[int, Any] | None) -> None:
    """Have autograd run what these dictionaries hold, now and later, so that handles of hooks go on removing them."""
    with DisableTorchFunctionSubclass():
        if computed is not None:
            tensor._backward_hooks = computed
        if added is not None:
            tensor._post_accumulate_grad_hooks = added


def storage_key(tensor: torch.Tensor) -> int:
    """Return a number that identifies a tensor's storage while it is alive; meta tensors have one too.

    Raises:
        NotImplementedError, RuntimeError: the tensor has no storage, as sparse ones.
    """
    key: int = tensor.untyped_storage()._cdata
    return key


#: ``(tensors, p, dtype=…)``: the p-norms of tensors of one type and device, computed in ``dtype``.
norms_of: Callable[..., Sequence[torch.Tensor]] = _private("measures gradients", "_foreach_norm")


def values_of(sparse: torch.Tensor) -> torch.Tensor:
    """Return the entries of a sparse tensor as they lie there, to be changed in place; several may be of one element."""
    return sparse._values()


def has_step_hooks(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether something runs before each update of an optimizer, and may change gradients."""
    hooks: Mapping[int, Any] = getattr(optimizer, "_optimizer_step_pre_hooks", {})
    return bool(hooks)


def unscale(gradients: list[torch.Tensor], found: torch.Tensor, inverse: torch.Tensor) -> None:
    """Multiply gradients by ``inverse``; ``found`` becomes 1 if one of them is not finite. Both have one element."""
    fused = getattr(torch, "_amp_foreach_non_finite_check_and_unscale_", None)
    if fused is not None:
        fused(gradients, found, inverse)
        return
    for gradient in gradients:
        found.logical_or_(gradient.isfinite().all().logical_not().to(found.device))
        gradient.mul_(inverse.to(gradient.device))


# -- dispatch ----------------------------------------------------------------------------------------------------------

#: A context inside which no dispatch mode sees operations.
without_modes: Callable[[], Any] = _private(
    "makes tensors past those who record their creation", "utils._python_dispatch._disable_current_modes"
)

#: The dispatch modes of the calling thread, outermost first.
dispatch_modes: Callable[[], list[Any]] = _private(
    "finds the deferral that a model is created in", "utils._python_dispatch._get_current_dispatch_mode_stack"
)

_function_modes: Callable[[], list[Any]] = _private(
    "learns the default device of a thread", "overrides._get_current_function_mode_stack"
)
#: How many modes that take functions are on, on the calling thread.
count_function_modes: Callable[[], int] = _private(
    "learns the default device of a thread", "_C._len_torch_function_stack"
)
_OPERATOR = type(torch.ops.aten.add.Tensor)


def default_device() -> str | None:
    """Return the kind of the calling thread's default device for new tensors; None if none was set."""
    if not count_function_modes():  # asked for at every call
        return None
    # Imported by the code that sets one first.
    kind = getattr(sys.modules.get("torch.utils._device"), "DeviceContext", ())
    return next((mode.device.type for mode in reversed(_function_modes()) if isinstance(mode, kind)), None)


def is_operator(function: Any) -> bool:
    """Return whether the function in a call of a dispatch mode is an operator, not a higher-order function."""
    return isinstance(function, _OPERATOR)


def schema_of(function: Any) -> Any:
    """Return an operator's schema, with ``name``, ``arguments`` and ``is_mutable``; None for a Python function."""
    return getattr(function, "_schema", None)


# -- modules -----------------------------------------------------------------------------------------------------------

#: ``(module, *args, **kwargs)``: a module's call with its hooks. It bypasses a ``__call__`` of its class.
call_with_hooks: Callable[..., Any] = _private("calls modules for other stages", "nn.Module._wrapped_call_impl")

#: Classes of modules that keep running statistics and may count batches while they train.
NORMS_WITH_STATISTICS: type | tuple[type, ...] = getattr(nn.modules.batchnorm, "_NormBase", None) or (
    nn.modules.batchnorm._BatchNorm,
    nn.modules.instancenorm._InstanceNorm,
)

#: What ``load_state_dict`` returns, from the missing and the unexpected names.
IncompatibleKeys: Callable[[list[str], list[str]], Any] = type(nn.Module().load_state_dict({}))


def before_loading(module: nn.Module, hook: Callable[..., None]) -> None:
    """Call ``hook(module, state_dict, prefix, …)`` before a module takes its part of a state."""
    if hasattr(nn.Module, "register_load_state_dict_pre_hook"):  # since PyTorch 2.5
        module.register_load_state_dict_pre_hook(hook)
    else:
        module._register_load_state_dict_pre_hook(hook, with_module=True)


_parse_to: Callable[..., Any] = _private("reads the arguments of DistributedModel.to", "_C._nn._parse_to")


def dtype_asked_for(*args: Any, **kwargs: Any) -> torch.dtype | None:
    """Return the dtype among the arguments of ``Module.to``, or None.

    Raises:
        TypeError, RuntimeError: it takes no such arguments.
    """
    dtype: torch.dtype | None = _parse_to(*args, **kwargs)[1]
    return dtype


def device_asked_for(*args: Any, **kwargs: Any) -> torch.device | None:
    """Return the device among the arguments of ``Module.to``, or None."""
    device: torch.device | None = _parse_to(*args, **kwargs)[0]
    return device


def activation_wrappers() -> Any:
    """Return the module with the classes of modules that PyTorch has wrapped to checkpoint or offload them."""
    return importlib.import_module("torch.distributed.algorithms._checkpoint.checkpoint_wrapper")


# -- process groups ----------------------------------------------------------------------------------------------------

#: The store through which the ranks of the default group have met.
default_store: Callable[[], dist.Store] = _private(
    "agrees on checkpoints that are written in the background, and meets ranks of groups that a script has started",
    "distributed.distributed_c10d._get_default_store",
)

#: End collectives that are under way, and all groups; no rank need take part. PyTorch has it since 2.6.
abort_process_groups: Callable[[], None] = _private(
    "leaves collectives that other ranks do not come to", "distributed.distributed_c10d._abort_process_group"
)

#: ``(group, output, input[, options])``: an all-gather into one tensor; its name changed in PyTorch 2.13.
all_gather_single: Any = _private(
    "gathers shards", "distributed.ProcessGroup.all_gather_single", "distributed.ProcessGroup._allgather_base"
)

#: ``(group, outputs, inputs[, options])``: several of these at once.
all_gather_single_coalesced: Any = _private(
    "gathers several shards at once",
    "distributed.ProcessGroup.all_gather_single_coalesced",
    "distributed.ProcessGroup.allgather_into_tensor_coalesced",
)

_set_default_backend: Callable[[Any, Any], None] = _private(
    'serves the backend "smddp"', "distributed.ProcessGroup._set_default_backend"
)


def give_backends(group: Any, backends: Mapping[str, tuple[Any, Any]], default: Any) -> None:
    """Register backends, each with its type, by kind of device, with a process group that has none.

    Args:
        default: type of the backend for operations without a tensor that determines a device.

    Raises:
        SMPRuntimeError: this PyTorch is older than 2.6; its groups do not accept a default backend.
    """
    _set_default_backend(group, default)
    for device, (kind, backend) in backends.items():
        group._register_backend(torch.device(device), kind, backend)


def name_group(group: Any, name: str) -> None:
    """Give a process group its name, which errors and traces show."""
    group._set_group_name(name)


def count_collectives(backend: Any) -> None:
    """Let a backend number its collectives, which messages about ranks that fell behind need."""
    backend._set_sequence_number_for_group()


def timeout_of(backend: Any) -> timedelta:
    """Return the collective timeout of a backend with options."""
    return backend.options._timeout


def set_timeout(options: Any, timeout: timedelta) -> None:
    """Set how long a backend that is made with these options waits for a collective."""
    options._timeout = timeout


def stay_in(mode: Any) -> None:
    """Enter a dispatch mode on the calling thread, for as long as it lives. Several threads may be in one."""
    from torch.utils._python_dispatch import _push_mode

    _push_mode(mode)


def running_node() -> torch.autograd.graph.Node | None:
    """Return the autograd node that runs its backward on the calling thread."""
    return torch._C._current_autograd_node()


def loss_reduction(node: torch.autograd.graph.Node) -> str | None:
    """Return how the node of a loss function joins its elements, ``"mean"`` or ``"sum"``; None for any other node."""
    return {1: "mean", 2: "sum"}.get(getattr(node, "_saved_reduction", 0))  # at::Reduction, which has 0 for none


def key_of_storage(storage: torch.UntypedStorage) -> int:
    """Return a number that identifies a storage while it is alive, the same for all its Python objects."""
    return storage._cdata


def absent_store() -> dist.Store:
    """Return a store for process groups without real other ranks; its import registers the backend ``"fake"``."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    return FakeStore()


def group_of_operation(value: Any) -> dist.ProcessGroup | None:
    """Return the process group that an argument of a ``torch.distributed`` operation is or names; else None."""
    with contextlib.suppress(RuntimeError, KeyError, ValueError):
        if isinstance(value, torch.ScriptObject):  # so is the operation of a reduction
            return dist.ProcessGroup.unbox(value)
        if isinstance(value, str):
            return dist.distributed_c10d._resolve_process_group(value)  # type: ignore[arg-type]  # a name
    return None


def packet_of(operation: Any) -> Any:
    """Return the packet of an operation, which has all its overloads."""
    return operation._overloadpacket


#: Operations that return a tensor in the memory of their argument, though their schemas do not declare it.
SHARING = frozenset({torch.ops.aten._unsafe_view.default})

#: The operation behind ``tensor.item()``.
ITEM = torch.ops.aten._local_scalar_dense.default


# -- the profiler, and what holds a GPU's memory ---------------------------------------------------------------------


def of_all_threads() -> Any:
    """Return the profiler's configuration to record all threads but no allocations; None if this release has none."""
    profiler = getattr(torch._C, "_profiler", None)
    try:
        return profiler._ExperimentalConfig(profile_all_threads=True)  # type: ignore[union-attr]  # a release without it
    except (AttributeError, TypeError):
        return None


def record_memory_history() -> None:
    """Let the allocator record which lines of code hold the GPU's memory, if this release can."""
    if (record := getattr(torch.cuda.memory, "_record_memory_history", None)) is not None:
        record(max_entries=100_000)  # the newest ones are kept


def write_memory_history(path: str | os.PathLike[str]) -> None:
    """Write the recorded memory history for pytorch.org/memory_viz, and stop recording, if this release can."""
    dump = getattr(torch.cuda.memory, "_dump_snapshot", None)
    if dump is not None:
        dump(os.fspath(path))
        torch.cuda.memory._record_memory_history(enabled=None)
