"""The linear maps inside distributed layers: their weights, and which part of them a rank has."""

from __future__ import annotations

from typing import TYPE_CHECKING

from smp_config import Group
from smp_runtime.nn.distributed_module import DistributedModule
from smp_runtime.tensor_parallel.initialisation import constant, normal, uniform_for

if TYPE_CHECKING:
    from torch import nn


class _Projection(DistributedModule):
    weight: nn.Parameter
    bias: nn.Parameter | None

    def __init__(self, in_features: int, std: float | None) -> None:
        super().__init__()
        self._fill_weight = uniform_for(in_features) if std is None else normal(std)
        self._fill_bias = uniform_for(in_features) if std is None else constant(0.0)


class ColumnProjection(_Projection):
    """Weight ``[out / tp, in]``: each rank makes its own features; applied by the layer that holds it.

    Args:
        std: of normal weights with biases of zero; None means as ``nn.Linear`` does.
        bias: whether it has one, ``[out / tp]``.
    """

    def __init__(self, in_features: int, out_features: int, std: float | None, bias: bool = True) -> None:
        super().__init__(in_features, std)
        self.add_split("weight", (out_features, in_features), 0, self._fill_weight)
        if bias:
            self.add_split("bias", (out_features,), 0, self._fill_bias)
        else:
            self.register_parameter("bias", None)


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
        if bias:
            self.add_whole("bias", (out_features,), self._fill_bias, reduction)
        else:
            self.register_parameter("bias", None)
