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
    for part in module.modules() if group.size > 1 else ():
        is_split = any(
            isinstance(inside, DistributedModule) or entry_of(inside) is not None for inside in part.modules()
        )
        if not is_split:
            continue
        if isinstance(part, nn.TransformerEncoderLayer):
            part.activation_relu_or_gelu = 0
        if isinstance(part, nn.TransformerEncoder) and getattr(part, "use_nested_tensor", False) and len(part.layers):
            part.use_nested_tensor = False
            part.layers[-1].register_forward_hook(_zero_padding_of(part), with_kwargs=True, prepend=True)


def _zero_padding_of(encoder: nn.TransformerEncoder) -> Any:
    """Return a hook of the last layer that sets padding to zero in evaluation.

    PyTorch's encoder would pass on nested tensors there, with the same effect.
    """

    def hook(layer: nn.Module, args: Any, kwargs: Any, result: torch.Tensor) -> torch.Tensor | None:
        mask, given = kwargs.get(_MASK), kwargs.get("src_mask")
        trains = torch.is_grad_enabled() and (result.requires_grad or any(p.requires_grad for p in layer.parameters()))
        if mask is None or given is not None or trains or layer.training or result.dim() != 3 or mask.dim() != 2:
            return None
        padding = mask if mask.dtype == torch.bool else mask == float("-inf")
        attention: Any = layer.self_attn
        if not attention.batch_first or torch.is_autocast_enabled():
            return None
        return result.masked_fill(padding.unsqueeze(-1), 0.0)

    return hook
