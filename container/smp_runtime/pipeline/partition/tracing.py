"""The tracing step: it runs one microbatch forward and leaves costs in the model's tree, but no mark on the model.

Modules are seen where ``nn.Module.__call__`` asks for their compiled call. Classes with a ``__call__`` of
their own go through it too, with all arguments, hooks included. Operations are seen below autograd, and
parameters where Python passes them to a function. All of this is on the model's own modules or on this
thread; other threads and modules are not affected.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.autograd.function import FunctionCtx
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import CheckpointFunction

from smp_runtime.errors import SMPUserError
from smp_runtime.microbatch_state.attribute_watch import AttributeWatch
from smp_runtime.microbatch_state.entries import ModuleSlot, Taken
from smp_runtime.microbatch_state.snapshot import Snapshot, restore_afterwards
from smp_runtime.pipeline.partition.meta_device import values_left_out
from smp_runtime.pipeline.partition.module_times import median_times, run_repeatedly
from smp_runtime.pipeline.partition.module_tree import (
    ForeignUse,
    ModuleFlow,
    ModuleNode,
    ModuleTree,
    Trace,
    order_by_call,
)
from smp_runtime.tensors import computing_time
from smp_runtime.tensors.flop_formulas import flop_registry, sdpa_flop_count
from smp_runtime.tensors.nested import argument_tensors, storage_of, tensor_bytes, tensors_in, total_bytes
from smp_runtime.tensors.torch_private import TorchDispatchMode, is_operator

#: Floating point operations that a device does while it moves one byte of its memory.
_MACHINE_BALANCE = {"cpu": 10.0}
_ACCELERATOR_BALANCE = 100.0
#: These touch only the rows that they return, not the whole of their arguments.
_LOOKUPS = {
    torch.ops.aten.embedding,
    torch.ops.aten.index_select,
    torch.ops.aten.gather,
    torch.ops.aten.index,
    torch.ops.aten._embedding_bag,  # noqa: SLF001 - its name as an operator
}
#: Functions that read a parameter's value without giving a tensor.
_READERS = set("item tolist numpy __bool__ __float__ __int__ __index__ __array__ equal allclose".split())
#: One that gives the tensor, and reads nothing.
_FREEZE = "requires_grad_"


class ValuesNeededError(SMPUserError):
    """An error: the model or the step function reads values of parameters that are not created yet."""

    code = "SMP305"


def trace(
    model: nn.Module,
    run: Callable[[], object],
    *,
    device: torch.device | str,
    times: bool = False,
    memory: bool = False,
) -> Trace:
    """Run a step function once and record the cost of each module.

    The model's buffers, gradients, attributes and flags, and the random generators, are afterwards as before.
    ``backward()`` does nothing meanwhile.

    Args:
        model: with values or on the meta device.
        device: where the model will be trained; decides the cost of moving memory compared with computing.
        times: measure seconds too, by running several times more; see
            :mod:`smp_runtime.pipeline.partition.module_times`.
        memory: measure the tensors that autograd keeps for backward; otherwise they are estimated from the
            sizes of the modules' outputs.

    Raises:
        ValuesNeededError: the parameters are on the meta device, and the model reads values.
    """
    tree = ModuleTree(model)
    on_meta = any(parameter.is_meta for parameter in model.parameters())
    device = torch.device(device)
    try:
        with restore_afterwards(model) as before, _NoBackward():
            recorder = _Recorder(tree, _MACHINE_BALANCE.get(device.type, _ACCELERATOR_BALANCE), memory)
            with recorder.running(), values_left_out(device) if on_meta else contextlib.nullcontext():
                run()
            recorder.note_changes(before)
            nodes = [tuple(map(tree.node_of, pair)) for pair in before.replaced()]
            replaced = tuple((old.path, new.path) for old, new in nodes if old is not None and new is not None)
        if times:
            if on_meta:
                raise SMPUserError(
                    "trace_execution_times is true, but the parameters are on the meta device, where nothing takes "
                    "time; set trace_execution_times=False, or delayed_parameter_initialization to false",
                    code="SMP305",
                )
            _measure_times(model, tree, run, device)
    except (RuntimeError, NotImplementedError) as error:
        if on_meta and "meta" in str(error).lower():
            said = str(error).partition("\n")[0]
            raise ValuesNeededError(
                f"the tracing step reads values of parameters that have none yet ({said})"
            ) from error
        raise
    order_by_call(tree.root)
    recorder.finish()
    flows, foreign = recorder.flows(), list(recorder.foreign)
    return Trace(tree.root, flows, foreign, recorder.attributes, traced=True, timed=times, replaced=replaced)


def settle(model: nn.Module, run: Callable[[], object]) -> None:
    """Run a step function once for the changes that its first call makes to the model's tree.

    Everything else is afterwards as before.
    """
    with restore_afterwards(model, keeps_tree=True), _NoBackward():
        run()


def module_that_raised(error: BaseException) -> str:
    """Return the path of the innermost module that raised an error in its traced call; empty for the step function."""
    path, trace = "", error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_globals is globals() and (node := trace.tb_frame.f_locals.get("node")) is not None:
            path = node.path
        trace = trace.tb_next
    return path


def _measure_times(model: nn.Module, tree: ModuleTree, run: Callable[[], object], device: torch.device) -> None:
    """Write the seconds of each module's own frame into the nodes, which have their operations already."""

    def once() -> _Stopwatch:
        watch = _Stopwatch(tree, device)
        with restore_afterwards(model), _NoBackward(), watch.running():
            run()
        return watch

    watches = run_repeatedly(once)
    kinds = {}
    for identity, node in tree.nodes():
        module, calls = tree.modules[identity], tuple(watches[0].calls[node.path])
        parameters = tuple((p.shape, p.dtype) for p in module.parameters(recurse=False))
        kinds[node.path] = (type(module), parameters, calls, node.flops)
    seconds = median_times([watch.seconds for watch in watches], kinds)
    for _, node in tree.nodes():
        node.seconds = seconds.get(node.path, 0.0)


class _TracedCalls:
    """An observer of the calls of a model's modules on this thread.

    Attributes:
        frames: the modules that are being called now, outermost first. The root is below all others, because
            the step function's own code runs on the rank that has the root.
    """

    def __init__(self, tree: ModuleTree) -> None:
        self.tree = tree
        self.frames: list[ModuleNode] = [tree.root]
        self._thread = threading.get_ident()

    def entered(self, node: ModuleNode, inputs: tuple[Any, ...]) -> None:
        """Handle the begin of a call; its node is already the innermost frame."""

    def left(self, node: ModuleNode, output: Any) -> None:
        """Handle the end of a call; its node is no longer a frame. ``output`` is None if the call raised."""

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Watch all calls inside the block."""
        modules = list(self.tree.modules.values())
        slots = [ModuleSlot(vars(module), "_compiled_call_impl") for module in modules]
        former = [slot.take() for slot in slots]
        for slot, module in zip(slots, modules, strict=True):
            original = module._compiled_call_impl or module._call_impl  # noqa: SLF001 - what __call__ runs
            slot.put(Taken(functools.partial(self._call, module, original)))
        try:
            yield
        finally:
            for slot, taken in zip(slots, former, strict=True):
                slot.put(taken)

    def _call(self, module: nn.Module, original: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        node = self.tree.node_of(module)
        if node is None or not self.on_this_thread():
            return original(*args, **kwargs)
        output = None
        self.frames.append(node)
        self.entered(node, (args, kwargs))
        try:
            output = original(*args, **kwargs)
            return output
        finally:
            self.frames.pop()
            self.left(node, output)

    def on_this_thread(self) -> bool:
        """Return whether the calling thread is the one that runs the step function."""
        return threading.get_ident() == self._thread


class _Recorder(_TracedCalls):
    """A recorder that counts operations, bytes and uses of values, and writes them into the nodes."""

    def __init__(self, tree: ModuleTree, balance: float, measures_memory: bool) -> None:
        super().__init__(tree)
        self.foreign: dict[ForeignUse, None] = {}
        self.attributes: list[tuple[str, str]] = []
        #: Paths of frames that use another module's attribute or buffer, by that module's identity and the name.
        self._accesses: defaultdict[tuple[int, str], dict[str, None]] = defaultdict(dict)
        self._balance = balance
        self._measures_memory = measures_memory
        self._order = 0
        #: Who wrote a storage last. The weak references keep the numbers from being used again.
        self._makers: dict[int, tuple[StorageWeakRef, ModuleNode]] = {}
        self._versions: defaultdict[int, int] = defaultdict(int)
        self._consumers: dict[tuple[int, int], tuple[ModuleNode, dict[str, int]]] = {}
        self._kept: set[int] = set()
        self._exposed: set[int] = set()
        for parameter, holder, _ in tree.parameters.values():
            self._made(parameter, holder)
            self._kept.add(storage_of(parameter))

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        packing: Any = contextlib.nullcontext()
        if self._measures_memory:
            packing = torch.autograd.graph.saved_tensors_hooks(self._pack, _unpack)
        watch = AttributeWatch(self.attribute_used, self.attribute_used, self.on_this_thread)
        with super().running(), packing, _Operations(self), _ParameterUses(self), watch:
            watch.begin(self.tree.modules.values())
            yield

    def finish(self) -> None:
        """Set the cost of each module that was called to at least one operation per call."""
        for node in self.tree.root.walk():
            node.flops = max(node.flops, float(node.calls))

    def flows(self) -> list[ModuleFlow]:
        """Return the flows; tensors with the same maker and the same users are one flow."""
        total: defaultdict[tuple[str, tuple[str, ...]], int] = defaultdict(int)
        for maker, users in self._consumers.values():
            total[maker.path, tuple(users)] += max(users.values())
        return [ModuleFlow(maker, users, size) for (maker, users), size in total.items() if size]

    # -- calls -----------------------------------------------------------------------------------------------------

    def entered(self, node: ModuleNode, inputs: tuple[Any, ...]) -> None:
        if node.order < 0:
            node.order, self._order = self._order, self._order + 1
        node.calls += 1
        tensors = tensors_in(inputs)
        node.input_bytes = max(node.input_bytes, total_bytes(tensors))
        self._exposed.update(id(tensor) for tensor in tensors if id(tensor) in self.tree.buffers)
        if (function := _function_around()) is not None:
            user = self.frames[-2].path
            name = f"{function} of {user or 'the model'}"
            # Its backward may call the module again, past the calls that reach other stages.
            self.foreign.update(dict.fromkeys(ForeignUse(user, n.path, name, "function") for n in node.walk()))

    def left(self, node: ModuleNode, output: Any) -> None:
        tensors = tensors_in(output)
        node.output_bytes = max(node.output_bytes, total_bytes(tensors))
        for tensor in tensors:
            if id(tensor) in self.tree.parameters or id(tensor) in self.tree.buffers:
                self._exposed.add(id(tensor))
            storage = storage_of(tensor)
            if self._measures_memory or storage in self._kept:
                continue
            if self._maker(tensor) is node:
                self._kept.add(storage)
                node.activation_bytes += tensor_bytes(tensor)

    # -- operations ------------------------------------------------------------------------------------------------

    def operation(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], out: Any) -> None:
        """Record an operation that ran in the innermost frame."""
        node = self.frames[-1]
        inputs, outputs = argument_tensors((args, kwargs)), argument_tensors(out)
        for tensor in inputs:
            self._used(tensor, node)
        if func.is_view:
            for tensor in outputs:  # a view of a view of a value keeps the value's maker
                if storage_of(tensor) not in self._makers:
                    self._made(tensor, node)
            return
        for tensor in outputs:
            self._made(tensor, node)
        moved = total_bytes(outputs)
        moved = 2 * moved if func.overloadpacket in _LOOKUPS else moved + total_bytes(inputs)
        backward = min(2, sum(tensor.requires_grad for tensor in inputs)) if torch.is_grad_enabled() else 0
        node.flops += (1 + backward) * max(_flops(func, args, kwargs, out), moved * self._balance)

    def _made(self, tensor: torch.Tensor, node: ModuleNode) -> None:
        storage = storage_of(tensor)
        known = self._makers.get(storage)
        self._makers[storage] = known[0] if known else StorageWeakRef(tensor.untyped_storage()), node
        self._versions[storage] += 1

    def _maker(self, tensor: torch.Tensor) -> ModuleNode:
        entry = self._makers.get(storage_of(tensor))
        return self.tree.root if entry is None else entry[1]

    def _used(self, tensor: torch.Tensor, node: ModuleNode) -> None:
        maker, storage = self._maker(tensor), storage_of(tensor)
        if maker is not node and tensor.dim() > 0:
            value = storage, self._versions[storage]
            users = self._consumers.setdefault(value, (maker, {}))[1]
            users[node.path] = max(users.get(node.path, 0), tensor_bytes(tensor))

    # -- memory and parameters -------------------------------------------------------------------------------------

    def _pack(self, tensor: torch.Tensor) -> torch.Size:
        storage = storage_of(tensor)
        if storage not in self._kept:
            self._kept.add(storage)
            if storage not in self._makers:
                self._made(tensor, self.frames[-1])
            self.frames[-1].activation_bytes += tensor.untyped_storage().nbytes()
        return tensor.shape

    def parameter_used(self, parameter: torch.Tensor) -> None:
        """Record that a function got a parameter of the model as an argument."""
        _, holder, name = self.tree.parameters[id(parameter)]
        user = self.frames[-1]
        holds = any(held.name == name for held in user.parameters)
        # Others may use a parameter that its module has returned, because it reaches them as a value.
        if not holds and id(parameter) not in self._exposed:
            self.foreign[ForeignUse(user.path, holder.path, name)] = None

    # -- buffers and attributes ------------------------------------------------------------------------------------

    def buffer_used(self, buffer: torch.Tensor) -> None:
        """Record that a function got a buffer of the model as an argument."""
        if id(buffer) not in self._exposed:
            _, module, name = self.tree.buffers[id(buffer)]
            self.attribute_used(module, name)

    def attribute_used(self, module: nn.Module, name: str) -> None:
        """Record that an attribute of a module is read or set."""
        node = self.tree.node_of(module)
        if node is not None and node is not self.frames[-1]:
            self._accesses[id(module), name][self.frames[-1].path] = None

    def note_changes(self, before: Snapshot) -> None:
        """Bind the users of buffers and attributes that change while the model runs to the module where they change."""
        for module, name, kind in before.changed():
            node = self.tree.node_of(module)
            if node is None:
                continue
            if kind == "attribute":
                self.attributes.append((node.path, name))
            called = f"{node.path}.{name}" if node.path else name
            for user in self._accesses.get((id(module), name), ()):
                self.foreign[ForeignUse(user, node.path, called, kind)] = None


def _function_around() -> str | None:
    """Return the name of the autograd function with a forward that calls the module being entered, or None.

    Only functions that the model calls count. PyTorch's checkpoints do not.
    """
    frame, calls = inspect.currentframe(), 0
    while frame is not None and calls < 2:  # the second is the call of the module around
        code = frame.f_code
        calls += frame.f_globals is globals() and code.co_name == "_call"
        is_method = code.co_name == "forward" and code.co_argcount > 0
        context: Any = frame.f_locals.get(code.co_varnames[0]) if is_method else None
        if isinstance(context, FunctionCtx):
            name = type(context).__name__.removesuffix("Backward")
            return None if name == CheckpointFunction.__name__ else name
        frame = frame.f_back
    return None


class _Operations(TorchDispatchMode):
    """A mode that reports every operation below autograd to a recorder."""

    def __init__(self, recorder: _Recorder) -> None:
        super().__init__()
        self._recorder = recorder

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not is_operator(func):
            return func(*args, **kwargs)
        if torch.is_inference_mode_enabled() and func.overloadpacket not in flop_registry:
            with self:
                out = func.decompose(*args, **kwargs)
            if out is not NotImplemented:
                return out
        out = func(*args, **kwargs)
        self._recorder.operation(func, args, kwargs, out)
        return out


class _ParameterUses(TorchFunctionMode):
    """A mode that reports parameters to a recorder if a function reads their values; shapes and types do not count."""

    def __init__(self, recorder: _Recorder) -> None:
        super().__init__()
        self._recorder = recorder

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        name = getattr(func, "__name__", "")
        is_question = name not in _READERS and not tensors_in(out)
        if name == _FREEZE or is_question:
            return out
        tree = self._recorder.tree
        for tensor in argument_tensors((args, kwargs)):
            if id(tensor) in tree.parameters:
                self._recorder.parameter_used(tensor)
            elif id(tensor) in tree.buffers:
                self._recorder.buffer_used(tensor)
        return out


class _NoBackward(TorchFunctionMode):
    """A mode in which ``backward`` does nothing."""

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.backward or func is torch.autograd.backward:
            return None
        return func(*args, **(kwargs or {}))


class _Stopwatch(_TracedCalls):
    """A measurement of the seconds of each module's own frame, in one run.

    Attributes:
        seconds: by path.
        calls: of every module by path, the shapes of the arguments of its calls.
    """

    def __init__(self, tree: ModuleTree, device: torch.device) -> None:
        super().__init__(tree)
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self.calls: defaultdict[str, list[tuple[torch.Size, ...]]] = defaultdict(list)
        self._device = device
        self._last = self._now()

    def _now(self) -> float:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return computing_time.now()

    def entered(self, node: ModuleNode, inputs: tuple[Any, ...]) -> None:
        self._charge(self.frames[-2])
        self.calls[node.path].append(tuple(tensor.shape for tensor in tensors_in(inputs)))
        self._last = self._now()

    def left(self, node: ModuleNode, output: Any) -> None:
        self._charge(node)

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        self._last = self._now()
        with super().running():
            yield
            self._charge(self.frames[-1])

    def _charge(self, node: ModuleNode) -> None:
        now = self._now()
        self.seconds[node.path] += now - self._last
        self._last = now


def _unpack(shape: torch.Size) -> torch.Tensor:
    raise SMPUserError(
        f"the model asks autograd for gradients while it is traced (a saved tensor of shape {list(shape)} is read), but "
        "with trace_memory_usage=True saved tensors are measured and not kept; set trace_memory_usage=False",
        code="SMP305",
    )


def _flops(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], out: Any) -> float:
    packet = func.overloadpacket
    if packet in flop_registry:
        return float(flop_registry[packet](*args, **kwargs, out_val=out))
    name = packet.__name__
    if "scaled_dot_product" not in name or "backward" in name:
        return 0.0
    shapes = [argument.shape for argument in args[:3]]
    return float(sdpa_flop_count(*shapes))
