"""Linear maps over several ranks: ``DistributedLinear``, and those inside distributed layers."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from smp_config import Group
from smp_runtime.errors import SMPUserError
from smp_runtime.fp8.current import find_call
from smp_runtime.nn.distributed_module import DistributedModule, ReadByOthers
from smp_runtime.tensor_parallel.collectives import (
    agreeing_on_shape,
    exchange_parts,
    scatter_summed,
    sum_partials,
    take_slice,
)
from smp_runtime.tensor_parallel.initialisation import constant_fill, normal_fill, uniform_for


class DistributedLinear(ReadByOthers):
    """``nn.Linear`` with a weight of ``[out, in / tp]`` on each rank.

    With a batch per rank, the ranks exchange their features of the input and reduce-scatter the output to its owners;
    with a common batch each takes its features of it and the output is summed.

    Args:
        in_features: channels of the input, over all ranks.
        out_features: channels of the output.
        bias: whether it has one, ``[out]``.
        device: where its parameters lie until ``smp.DistributedModel`` puts the model on this rank's device, which is also
            the default.
        dtype: of its parameters.

    Raises:
        IndivisibleError: (a ``ValueError``) the ranks do not divide ``in_features``.
        SMPUserError: when it is called, the ranks' batches have different shapes.

    Example:
        >>> linear = smp.nn.DistributedLinear(64, 16)
        >>> linear(torch.randn(8, 64)).shape
        torch.Size([8, 16])
    """

    weight: nn.Parameter
    bias: nn.Parameter | None
    #: Its products may be in 8 bits.
    multiplies_rows = True

    def __init__(self, in_features: int, out_features: int, bias: bool = True, device: Any = None, dtype: Any = None):
        super().__init__()
        self.in_features, self.out_features = in_features, out_features
        if dtype is not None:
            self._dtype = dtype
        self.share_of("in_features", in_features)
        # It is added to this rank's own output.
        self._add_parameters(bias, Group.RDP if self.tensor_group.prescaled else Group.DP)
        if device is not None:
            self._lie_on(torch.device(device))

    def _add_parameters(self, bias: bool, reduction: Group) -> None:
        fill = uniform_for(self.in_features)
        self.add_split("weight", (self.out_features, self.in_features), 1, fill)
        self.add_whole("bias", (self.out_features,), fill, reduction, exists=bias)

    def _map(self) -> torch.Tensor:
        """Return the weight, ``[out, in / tp]``."""
        return self._own_part("weight")

    def _lie_on(self, device: torch.device) -> None:
        if device.type == "meta":
            raise SMPUserError(
                "DistributedLinear got device='meta', where its weights would be lost; leave device out and create the model in "
                "smp.delay_param_initialization(), which computes them when they have their place",
                code="SMP307",
            )
        if not self.weight.is_meta:
            self.to(device)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Map ``[batch, …, in]`` to ``[batch, …, out]``."""
        group, product = self.tensor_group, find_call(self) or F.linear
        if group.size == 1:
            return product(input, self._map(), self.bias)
        if group.prescaled:
            output = sum_partials(product(take_slice(input, group, -1), self._map(), None), group)
        elif input.dim() < 2:
            raise SMPUserError(
                f"DistributedLinear got an input of shape {list(input.shape)}; with a batch per rank its first dim is the "
                "batch: add one with input.unsqueeze(0)",
                code="SMP307",
            )
        else:
            # Each rank gets its channels of all batches, and at the end the sum for its own batch.
            features = exchange_parts(agreeing_on_shape(input, group), group, split=-1, joined=0)
            output = scatter_summed(product(features, self._map(), None), group, 0)
        # Behind the sum, in which each rank's bias would count.
        return output if self.bias is None else output + self.bias

    def extra_repr(self) -> str:
        """Return the sizes over all ranks, as PyTorch prints them."""
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}"


class DistributedConv1D(DistributedLinear):
    """The same for Transformers' ``Conv1D``, a linear map that is stored transposed: ``[in / tp, out]`` on each rank."""

    def _add_parameters(self, bias: bool, reduction: Group) -> None:
        self.add_split("weight", (self.in_features, self.out_features), 0, normal_fill(0.02))
        self.add_whole("bias", (self.out_features,), constant_fill(0.0), reduction, exists=bias)

    def _map(self) -> torch.Tensor:
        return self._own_part("weight").t()


class _Projection(DistributedModule):
    weight: nn.Parameter
    bias: nn.Parameter | None
    multiplies_rows = True

    def __init__(self, in_features: int, std: float | None) -> None:
        super().__init__()
        self._fill_weight = uniform_for(in_features) if std is None else normal_fill(std)
        self._fill_bias = uniform_for(in_features) if std is None else constant_fill(0.0)


class ColumnProjection(_Projection):
    """Weight ``[out / tp, in]``: each rank makes its own features; applied by the layer that holds it.

    Args:
        std: of normal weights with biases of zero; None means as ``nn.Linear`` does.
        bias: whether it has one, ``[out / tp]``.
    """

    def __init__(self, in_features: int, out_features: int, std: float | None, bias: bool = True) -> None:
        super().__init__(in_features, std)
        self.add_split("weight", (out_features, in_features), 0, self._fill_weight)
        self.add_split("bias", (out_features,), 0, self._fill_bias, exists=bias)


class RowProjection(_Projection):
    """Weight ``[out, in / tp]``: the ranks' results are summed; the bias, ``[out]``, is added once.

    Args:
        std: of normal weights with biases of zero; None means as ``nn.Linear`` does.
        reduction: over which group the bias's gradient is averaged.
    """

    def __init__(
        self, in_features: int, out_features: int, std: float | None, bias: bool = True, reduction: Group = Group.RDP
    ) -> None:
        super().__init__(in_features, std)
        self.add_split("weight", (out_features, in_features), 1, self._fill_weight)
        self.add_whole("bias", (out_features,), self._fill_bias, reduction, exists=bias)
