"""Functions of ``torch.autograd.Function`` on sequences, which their call does not hand to subclasses of tensors.

They would keep the gradients of a slice from it: their own graph begins at the wrapper, which has none.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.checkpoint import CheckpointFunction

from smp_runtime.context.exchange import ContextGroup
from smp_runtime.context.module_hooks import SequenceBackwardHook, refuse_older_hooks
from smp_runtime.context.proofs.function_gradients import FunctionOnSlices, cut_with_true_gradients
from smp_runtime.context.proofs.position_wise import PositionWise
from smp_runtime.context.proofs.side_effects import is_ours
from smp_runtime.context.rules.pointwise import align
from smp_runtime.context.sequence import ShardedSequence, gather_all, sequences_in
from smp_runtime.context.token_functions import run_on_tokens
from smp_runtime.errors import SMPRuntimeError
from smp_runtime.tensors.nested import map_leaves

if TYPE_CHECKING:
    from smp_runtime.context.layout import SequenceLayout

#: What is known of each function's class.
_position_wise: weakref.WeakKeyDictionary[type[torch.autograd.Function], PositionWise] = weakref.WeakKeyDictionary()

_original_grad: Callable[..., Any] = torch.autograd.grad

_original = torch.autograd.Function.__dict__["apply"]

#: Its functions return the tensors that they get: they are there for what they do in a backward pass.
_PASSING = "torch.distributed.fsdp."

#: Its functions take numbers of positions, which a proof on some positions cannot give them.
_INDEXING = "torch._dynamo."


def _apply(cls: type[torch.autograd.Function], *args: Any, **kwargs: Any) -> Any:
    """Run a function on slices or on whole sequences, if there are any among its arguments."""
    __tracebackhide__ = True  # reports name the caller
    call = _original.__get__(None, cls)
    found = sequences_in((args, kwargs))
    if not found:
        return call(*args, **kwargs)
    if cls.__module__.startswith(_PASSING) or cls.__name__ == "BackwardHookFunction":
        return _pass(call, args)
    if cls.__name__ == "_NoopSaveInputs":
        raise SMPRuntimeError(
            f"torch.utils.checkpoint of PyTorch {torch.__version__} cannot keep sequences that are cut over ranks: checkpoint with "
            "smp.set_activation_checkpointing, with use_reentrant=True, or install a newer PyTorch",
            code="SMP303",
        )
    if cls is CheckpointFunction:
        return _checkpoint_slices(call, found[0], *args)
    if cls.__module__.startswith(_INDEXING):
        return _call_whole(cls, *args, **kwargs)
    if is_ours(cls) and hasattr(cls, "token_arguments"):
        result = run_on_tokens(cls, call, args)  # type: ignore[arg-type]
        return _call_whole(cls, *args, **kwargs) if result is NotImplemented else result
    if cls not in _position_wise:
        run = functools.partial(_call_whole, cls)
        # Backward passes of this library are linear, and may leave weights' gradients for later.
        _position_wise[cls] = PositionWise(run, knows_types=True) if is_ours(cls) else FunctionOnSlices(run)
    return _position_wise[cls](*args, **kwargs)


def _checkpoint_slices(call: Callable[..., Any], first: ShardedSequence, run: Callable[..., Any], *rest: Any) -> Any:
    """Checkpoint with re-entry: the function keeps slices, and what it runs has sequences of them."""
    forms = [(one.dim_held, one.sequence_layout) if isinstance(one, ShardedSequence) else None for one in rest]
    returned: list[tuple[int, SequenceLayout] | None] = []

    def wrap(value: Any, form: tuple[int, SequenceLayout] | None) -> Any:
        return value if form is None else first.like(value, *form)

    def take_apart(value: Any) -> Any:
        is_cut = isinstance(value, ShardedSequence)
        returned.append((value.dim_held, value.sequence_layout) if is_cut else None)
        return value.local if is_cut else value

    def run_on_slices(*values: Any) -> Any:
        given = [wrap(value, form) for value, form in zip(values, forms[1:], strict=True)]
        returned.clear()
        return map_leaves(take_apart, run(*given))

    result = call(run_on_slices, *(one.local if isinstance(one, ShardedSequence) else one for one in rest))
    left = iter(list(returned))
    return map_leaves(lambda value: wrap(value, next(left)), result)


def _pass(call: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    """Run a function that returns the tensors that it gets, in their order."""
    given = [each for each in args if isinstance(each, torch.Tensor)]
    found = call(*map(_local, args))
    results = found if isinstance(found, tuple) else (found,)
    wrapped = []
    for each, result in zip(given, results, strict=True):
        if isinstance(each, ShardedSequence):
            result = each.like(result)
        wrapped.append(result)
    return tuple(wrapped) if isinstance(found, tuple) else wrapped[0]


def _call_whole(cls: type[torch.autograd.Function], *args: Any, **kwargs: Any) -> Any:
    """Run a function on whole tensors, or on slices that stand for them."""
    __tracebackhide__ = True  # reports name the caller
    call = _original.__get__(None, cls)
    found = sequences_in((args, kwargs))
    if not found:
        return call(*args, **kwargs)
    name, first = cls.__name__, found[0]
    return cut_with_true_gradients(call(*gather_all(args, name), **gather_all(kwargs, name)), first)


def _save_inputs(frame: Any, save: Callable[..., None], *args: Any) -> None:
    """Keep the slices of sequences that PyTorch's checkpointing keeps as inputs, and what makes sequences of them again."""
    # Without the slices themselves: hooks may keep these elsewhere.
    frame.forms = []
    for one in args:
        form = None
        if isinstance(one, ShardedSequence):
            form = one.dim_held, one.sequence_layout, one.group
        frame.forms.append(form)
    save(frame, *map(_local, args))


def _get_inputs(frame: Any, get: Callable[..., list[Any]]) -> list[Any]:
    kept = get(frame)
    forms = getattr(frame, "forms", None) or [None] * len(kept)
    return [value if form is None else ShardedSequence(value, *form) for form, value in zip(forms, kept, strict=True)]


def _with_slices(method: Callable[..., Any], change: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def changed(frame: Any, *args: Any) -> Any:
        __tracebackhide__ = True  # reports name the caller
        return change(frame, method, *args)

    return changed


def _differentiate(outputs: Any, inputs: Any, grad_outputs: Any = None, *args: Any, **kwargs: Any) -> Any:
    """Return gradients of one process where the graph has crossed the ranks of a context group."""
    __tracebackhide__ = True  # reports name the caller
    outputs, inputs = (list(each) if isinstance(each, Iterator) else each for each in (outputs, inputs))
    results = [outputs] if isinstance(outputs, torch.Tensor) else list(outputs)
    names = list(inputs) if isinstance(inputs, dict) else None
    wanted = [inputs] if isinstance(inputs, torch.Tensor) else list(inputs.values() if names else inputs)
    if not all(isinstance(one, torch.Tensor) for one in (*results, *wanted)):  # edges of a graph
        return _original_grad(outputs, inputs, grad_outputs, *args, **kwargs)
    group = next((one.group for one in sequences_in([results, wanted])), None) or _group_behind(results)
    if group is None:
        return _original_grad(outputs, inputs, grad_outputs, *args, **kwargs)
    upstream = [None] * len(results) if grad_outputs is None else grad_outputs
    given = [upstream] if isinstance(upstream, torch.Tensor) else list(upstream)
    shares = [_share_of(gradient, result) for gradient, result in zip(given, results, strict=True)]
    found = _original_grad(list(map(_local, results)), list(map(_local, wanted)), shares, *args, **kwargs)
    made = tuple(_of_one_process(gradient, one, group) for gradient, one in zip(found, wanted, strict=True))
    return dict(zip(names, made, strict=True)) if names else made


def _local(value: torch.Tensor) -> torch.Tensor:
    return value.local if isinstance(value, ShardedSequence) else value


def _share_of(gradient: torch.Tensor | None, result: torch.Tensor) -> torch.Tensor | None:
    if gradient is None or not isinstance(result, ShardedSequence):
        return gradient
    return align(gradient, result.sequence_layout, result.dim_held - result.dim(), result, "grad") * result.group.size


def _of_one_process(gradient: Any, one: torch.Tensor, group: ContextGroup) -> Any:
    if gradient is None:
        return None
    if isinstance(one, ShardedSequence):
        return one.like(gradient / group.size)
    return group.sum(gradient) / group.size


def _group_behind(results: list[torch.Tensor]) -> ContextGroup | None:
    """Return the context group whose ranks have exchanged something that results were computed of."""
    seen: set[Any] = set()
    left = [result.grad_fn for result in results]
    while left:
        node = left.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        group = getattr(node, "group", None)
        if isinstance(group, ContextGroup):
            return group
        left += [other for other, _ in node.next_functions]
    return None


def install() -> None:
    """Let functions see sequences; once in a process with context parallelism, since others pay nothing."""
    if torch.autograd.Function.__dict__["apply"] is not _original:
        return
    torch.autograd.Function.apply = classmethod(_apply)  # type: ignore[assignment]
    torch.autograd.grad = functools.wraps(_original_grad)(_differentiate)
    calls: Any = torch.nn.modules.module
    calls.BackwardHook = SequenceBackwardHook
    modules: Any = torch.nn.Module
    watch = modules._maybe_warn_non_full_backward_hook  # noqa: SLF001 - listed in torch_private

    @functools.wraps(watch)
    def watch_older(module: torch.nn.Module, inputs: Any, result: Any, *args: Any) -> None:
        refuse_older_hooks(module, inputs, result)
        watch(module, inputs, result, *args)

    modules._maybe_warn_non_full_backward_hook = watch_older  # noqa: SLF001 - as above
    frame: Any = torch.utils.checkpoint._CheckpointFrame  # noqa: SLF001 - listed in torch_private
    if hasattr(frame, "save_inputs"):
        frame.save_inputs = _with_slices(frame.save_inputs, _save_inputs)
        frame.get_inputs = _with_slices(frame.get_inputs, _get_inputs)
