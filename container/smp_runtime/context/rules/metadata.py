"""What a tensor says of itself: autograd's facts are those of the slice, sizes those of the whole."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from smp_runtime.context.proofs.side_effects import is_ours
from smp_runtime.context.rules.pointwise import align
from smp_runtime.context.sequence import FACTS, ShardedSequence, rule
from smp_runtime.errors import SMPUserError
from smp_runtime.tensors.torch_private import DisableTorchFunctionSubclass

#: Facts of autograd, which knows only the slice.
_OF_SLICE = ("requires_grad", "grad_fn", "is_leaf", "retains_grad", "output_nr", "_backward_hooks", "_version")

#: Facts of the whole tensor, which the wrapper has.
_OF_WHOLE = (
    "shape ndim dtype device layout is_cuda is_cpu is_meta is_sparse is_quantized is_complex is_mkldnn is_nested names itemsize "
    "is_xla is_xpu is_mps is_vulkan is_ipu is_maia is_mtia is_sparse_csr _base name nbytes"
).split()

#: Methods of the same.
_METHODS_OF_WHOLE = (
    "size dim ndimension numel nelement element_size stride is_floating_point is_complex is_signed get_device is_inference "
    "is_same_size __len__ __hash__ is_tensor is_conj is_neg __format__ storage_offset type has_names result_type"
).split()


@rule(*(f"get:{name}" for name in _OF_SLICE))
def _read_of_slice(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return func(args[0].local)


@rule(*(f"get:{name}" for name in _OF_WHOLE), *_METHODS_OF_WHOLE)
def _read_of_whole(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if len(args) > 1 and func.__name__ == "type":  # a conversion
        return args[0].like(func(args[0].local, *args[1:], **kwargs))
    with DisableTorchFunctionSubclass():
        return func(*args, **kwargs)


@rule("get:data")
def _read_data(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return args[0].like(args[0].local.data)


@rule("requires_grad_", "retain_grad", "is_contiguous", "register_post_accumulate_grad_hook")
@rule("untyped_storage", "data_ptr", "storage", "is_set_to")
def _change_slice(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    result = func(args[0].local, *args[1:], **kwargs)
    return args[0] if isinstance(result, torch.Tensor) else result


@rule("get:grad")
def _read_gradient(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return the gradient of one process: slices have one as many times larger as there are ranks."""
    sequence, gradient = args[0], func(args[0].local)
    return None if gradient is None else sequence.like(gradient / sequence.group.size)


@rule("register_hook")
def _watch_gradient(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Let a script's hook see, and change, the gradient of one process."""
    sequence, hook = args
    if is_ours(hook):
        return func(sequence.local, hook)
    # Not the sequence itself: the garbage collector cannot follow tensor → hook references.
    held, layout, group = sequence.dim_held, sequence.sequence_layout, sequence.group

    def show(gradient: torch.Tensor) -> torch.Tensor | None:
        shown = ShardedSequence(gradient / group.size, held, layout, group)
        changed = hook(shown)
        return None if changed is None else align(changed, layout, held - shown.dim(), shown, "hook") * group.size

    return func(sequence.local, show)


FACTS.update((_read_of_slice, _read_of_whole, _change_slice))


@rule("__set__")
def _set_attribute(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    sequence, value = args
    name = getattr(getattr(func, "__self__", None), "__name__", "")
    if not isinstance(sequence, ShardedSequence):
        return func(sequence, value.whole("__set__"))
    if name == "data" and value.shape == sequence.shape:
        held = sequence.dim_held - sequence.dim()
        sequence.local.data = align(value, sequence.sequence_layout, held, sequence, "data")
        return None
    if name == "data" or (name == "grad" and value is not None):
        raise SMPUserError(
            f"a script sets {name} of a sequence that is cut over {sequence.group.size} ranks: make a new tensor instead",
            code="SMP303",
        )
    return func(sequence.local, value)
