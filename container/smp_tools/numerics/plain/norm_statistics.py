"""Batch norms that use their first statistics, so that a rank's own batch and the global batch have the same results."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional

#: Batch norms, but for the one that averages over ranks.
_KINDS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)


def keep_statistics_out(model: nn.Module) -> bool:
    """Let the batch norms of a model normalise with the statistics that they have now; returns whether there are any.

    They still update their statistics, by which ranks that should have copies are compared.
    """
    found = [module for module in model.modules() if isinstance(module, (*_KINDS, nn.SyncBatchNorm))]
    for module in found:
        module.forward = _Forward(module)  # type: ignore[method-assign,assignment]
    return bool(found)


class _Forward:
    """The ``forward`` of one batch norm."""

    def __init__(self, module: Any) -> None:
        self._module, self._original = module, module.forward
        like = torch.zeros(()) if module.weight is None else module.weight
        if module.running_mean is None:
            self._mean = like.new_zeros(module.num_features)
            self._variance = like.new_ones(module.num_features)
        else:
            self._mean = module.running_mean.clone()
            self._variance = module.running_var.clone()

    def __call__(self, values: torch.Tensor) -> torch.Tensor:
        module = self._module
        # Statistics that all ranks have in common need a GPU.
        has_own_batch = not isinstance(module, nn.SyncBatchNorm)
        if module.training and has_own_batch:
            with torch.no_grad():
                self._original(values.detach())
        mean = self._mean.to(values.dtype)
        variance = self._variance.to(values.dtype)
        return functional.batch_norm(values, mean, variance, module.weight, module.bias, False, 0.0, module.eps)
