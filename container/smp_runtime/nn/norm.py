"""Layer normalisation: PyTorch's is fused already; inside distributed layers its parameters come as arguments."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from smp_config import Group
from smp_runtime.job import session as sessions
from smp_runtime.nn.distributed_module import DistributedModule
from smp_runtime.tensor_parallel.initialisation import constant_fill


class FusedLayerNorm(nn.LayerNorm):
    """Apex's interface over PyTorch's layer norm, which computes in one kernel and needs no other package.

    Args:
        normalized_shape: the last dims, as in ``nn.LayerNorm``.
        eps: added to the variance.
        elementwise_affine: whether it has weight and bias.
        memory_efficient: has no effect, with a warning: PyTorch's kernel keeps its input and two numbers per row.

    Example:
        >>> norm = smp.nn.FusedLayerNorm(64)
        >>> norm(torch.randn(2, 64)).shape
        torch.Size([2, 64])
    """

    def __init__(
        self, normalized_shape: Any, eps: float = 1e-5, elementwise_affine: bool = True, memory_efficient: bool = False
    ) -> None:
        super().__init__(normalized_shape, eps=eps, elementwise_affine=elementwise_affine)
        if memory_efficient:
            sessions.say_once(
                "FusedLayerNorm(memory_efficient=True) ignored: PyTorch's layer norm keeps its input for backward; to save that "
                "memory, checkpoint the layers around it with smp.set_activation_checkpointing"
            )


class RowNorm(DistributedModule):
    """The norm of a distributed layer: over the last dim, of rows that may lie on several ranks.

    Args:
        rms: root mean square norm, without mean and bias.
        reduction: over which group gradients are averaged.
    """

    weight: nn.Parameter
    bias: nn.Parameter | None

    def __init__(self, hidden: int, epsilon: float, *, rms: bool = False, reduction: Group = Group.RDP) -> None:
        super().__init__()
        self.epsilon = epsilon
        self.rms = rms
        self.add_whole("weight", (hidden,), constant_fill(1.0), reduction)
        self.add_whole("bias", (hidden,), constant_fill(0.0), reduction, exists=not rms)

    def forward(
        self, hidden: torch.Tensor, weight: torch.Tensor | None = None, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Normalize ``[..., hidden]``; ``weight`` and ``bias`` replace the module's own.

        A residual stream in float32 is normalized in float32. If the weight is in half precision, so is the result.
        """
        if weight is None:
            weight, bias = self.weight, self.bias
        if hidden.dtype is torch.float32 and weight.dtype is not torch.float32:
            wide_bias = None if bias is None else bias.float()
            return self._normed(hidden, weight.float(), wide_bias).to(weight.dtype)
        return self._normed(hidden, weight, bias)

    def _normed(self, hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        if not self.rms:
            return F.layer_norm(hidden, weight.shape, weight, bias, self.epsilon)
        # The squares overflow in float16.
        wide = hidden.float()
        normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.epsilon)
        return weight * normed.to(hidden.dtype)
