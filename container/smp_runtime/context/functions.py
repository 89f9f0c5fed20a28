"""Functions of ``torch.autograd.Function`` on sequences, which their call does not hand to subclasses of tensors.

They would keep the gradients of a slice from it: their own graph begins at the wrapper, which has none.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.checkpoint import CheckpointFunction

from smp_runtime.context.proofs.function_gradients import FunctionOnSlices, cut_with_true_gradients
from smp_runtime.context.sequence import ShardedSequence, gather_all, sequences_in
from smp_runtime.errors import SMPRuntimeError
from smp_runtime.tensors.nested import map_leaves

if TYPE_CHECKING:
    from smp_runtime.context.layout import SequenceLayout

#: What is known of each function's class.
_position_wise: weakref.WeakKeyDictionary[type[torch.autograd.Function], FunctionOnSlices] = weakref.WeakKeyDictionary()

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
    if cls.__module__.startswith(_PASSING):
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
    if cls not in _position_wise:
        _position_wise[cls] = FunctionOnSlices(functools.partial(_call_whole, cls))
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
    found = call(*(each.local if isinstance(each, ShardedSequence) else each for each in args))
    results = found if isinstance(found, tuple) else (found,)
    pairs = zip(given, results, strict=True)
    wrapped = tuple(each.like(result) if isinstance(each, ShardedSequence) else result for each, result in pairs)
    return wrapped if isinstance(found, tuple) else wrapped[0]


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
    frame.forms = [
        (one.dim_held, one.sequence_layout, one.group) if isinstance(one, ShardedSequence) else None for one in args
    ]
    save(frame, *(one.local if isinstance(one, ShardedSequence) else one for one in args))


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


def install() -> None:
    """Let functions see sequences; once in a process with context parallelism, since others pay nothing."""
    if torch.autograd.Function.__dict__["apply"] is not _original:
        return
    torch.autograd.Function.apply = classmethod(_apply)  # type: ignore[assignment]
    frame: Any = torch.utils.checkpoint._CheckpointFrame  # noqa: SLF001 - listed in torch_private.py
    if hasattr(frame, "save_inputs"):
        frame.save_inputs = _with_slices(frame.save_inputs, _save_inputs)
        frame.get_inputs = _with_slices(frame.get_inputs, _get_inputs)
