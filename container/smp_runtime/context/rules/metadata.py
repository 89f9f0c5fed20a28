"""What a tensor says of itself: autograd's facts are those of the slice, sizes those of the whole."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from smp_runtime.context.sequence import ShardedSequence, rule
from smp_runtime.tensors.torch_private import DisableTorchFunctionSubclass

#: Facts of autograd, which knows only the slice.
_OF_SLICE = ("requires_grad", "grad_fn", "is_leaf", "grad", "retains_grad", "output_nr", "_backward_hooks", "_version")

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


@rule("requires_grad_", "retain_grad", "register_hook", "is_contiguous", "register_post_accumulate_grad_hook")
@rule("untyped_storage", "data_ptr", "storage", "is_set_to")
def _change_slice(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    result = func(args[0].local, *args[1:], **kwargs)
    return args[0] if isinstance(result, torch.Tensor) else result


@rule("__set__")
def _set_attribute(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    sequence, value = args
    if not isinstance(sequence, ShardedSequence) or not isinstance(value, bool):
        return NotImplemented
    return func(sequence.local, value)
