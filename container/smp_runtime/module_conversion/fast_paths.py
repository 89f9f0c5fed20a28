"""PyTorch's kernels for transformer layers in evaluation, which read weights without calling their modules."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from smp_runtime.nn.distributed_module import DistributedModule
from smp_runtime.tensor_parallel.block_entry import entry_of

if TYPE_CHECKING:
    from smp_runtime.tensor_parallel.group import TensorGroup

_MASK = "src_key_padding_mask"


def leave_fast_paths(module: nn.Module, group: TensorGroup) -> None:
    """Keep split transformer layers from using such kernels; an encoder's results stay the same as with them."""
    if group.size == 1:
        return
    for part in module.modules():
        has_split_parts = any(_is_split(inside) for inside in part.modules())
        if not has_split_parts:
            continue
        if isinstance(part, nn.TransformerEncoderLayer):
            # PyTorch has no switch for the kernel, but takes it for ReLU (1) and GELU (2) only.
            part.activation_relu_or_gelu = 0
        if isinstance(part, nn.TransformerEncoder):
            _replace_nested_tensors(part)


def _replace_nested_tensors(encoder: nn.TransformerEncoder) -> None:
    uses_nested = getattr(encoder, "use_nested_tensor", False)
    if not uses_nested or not len(encoder.layers):
        return
    encoder.use_nested_tensor = False
    # The first of the layer's hooks, so that those of a script see the zeros too.
    encoder.layers[-1].register_forward_hook(_zero_padding_of(encoder), with_kwargs=True, prepend=True)


def _is_split(module: nn.Module) -> bool:
    return isinstance(module, DistributedModule) or entry_of(module) is not None


def _zero_padding_of(encoder: nn.TransformerEncoder) -> Any:
    """Return a hook of the last layer that sets padding to zero in evaluation.

    PyTorch's encoder would pass on nested tensors there, with the same effect.
    """

    def hook(layer: nn.Module, args: Any, kwargs: Any, result: torch.Tensor) -> torch.Tensor | None:
        mask = kwargs.get(_MASK)
        if mask is None or kwargs.get("src_mask") is not None:
            return None
        if not _would_nest(layer, mask, result):
            return None
        is_boolean = mask.dtype == torch.bool
        padding = mask if is_boolean else mask == float("-inf")
        return result.masked_fill(padding.unsqueeze(-1), 0.0)

    return hook


def _would_nest(layer: nn.Module, mask: torch.Tensor, result: torch.Tensor) -> bool:
    """Return whether PyTorch's own conditions for nested tensors hold."""
    are_batches = result.dim() == 3 and mask.dim() == 2
    attention: Any = layer.self_attn
    if not are_batches or not attention.batch_first:
        return False
    if layer.training:
        return False
    if torch.is_autocast_enabled():
        return False
    return not _wants_gradients(layer, result)


def _wants_gradients(layer: nn.Module, result: torch.Tensor) -> bool:
    if not torch.is_grad_enabled():
        return False
    return result.requires_grad or any(parameter.requires_grad for parameter in layer.parameters())
