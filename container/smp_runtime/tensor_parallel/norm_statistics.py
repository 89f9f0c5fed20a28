"""Norms over features that are split: their statistics over the last dim are those of all ranks' features.

A norm keeps its own forward pass. While it runs, means and variances over the last dim, and PyTorch's own
norms, are those of all ranks' features. The ranks exchange one number for each row and statistic, forward and
backward.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from smp_runtime.tensor_parallel import collectives
from smp_runtime.tensor_parallel.during_calls import DuringCalls

#: Functions that give a wrong result for a part of the features.
_MEANS = (torch.mean, torch.Tensor.mean)
_VARIANCES = (torch.var, torch.Tensor.var)


class SharedStatistics(DuringCalls):
    """A mode in which means and variances over the last dim are those of the features of all ranks."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in (F.layer_norm, F.rms_norm):
            return self._normed(func is F.layer_norm, *args, **kwargs)
        if func not in (*_MEANS, *_VARIANCES):
            return func(*args, **kwargs)
        # Only the last axis is divided over the ranks.
        if not _is_over_last(*args, **kwargs):
            return func(*args, **kwargs)
        if func in _MEANS:
            return self._of_all(func(*args, **kwargs))
        return self._variance(*args, **kwargs)

    def _of_all(self, mean: torch.Tensor) -> torch.Tensor:
        """Return the mean of the ranks' means; each rank uses it on its own features."""
        return collectives.use_replicated(collectives.sum_partials(mean / self.group.size, self.group), self.group)

    def _variance(
        self, x: torch.Tensor, dim: Any = -1, unbiased: bool = True, keepdim: bool = False, correction: Any = None
    ) -> torch.Tensor:
        mean = self._of_all(x.mean(-1, keepdim=True))
        found = self._of_all((x - mean).square().mean(-1, keepdim=keepdim))
        features = x.shape[-1] * self.group.size
        return found * (features / (features - (int(unbiased) if correction is None else correction)))

    def _normed(
        self,
        is_centred: bool,
        x: torch.Tensor,
        shape: Any,
        weight: torch.Tensor | None = None,
        bias: torch.Tensor | None = None,
        eps: float | None = None,
    ) -> torch.Tensor:
        # PyTorch's kernels compute in float32 at least.
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        if is_centred:
            wide = wide - self._of_all(wide.mean(-1, keepdim=True))
        if eps is None:  # PyTorch's defaults
            eps = 1e-5 if is_centred else torch.finfo(x.dtype).eps
        wide = wide * torch.rsqrt(self._of_all(wide.square().mean(-1, keepdim=True)) + eps)
        if weight is not None:
            wide = wide * weight
        if bias is not None:
            wide = wide + bias
        return wide.to(x.dtype)


def _is_over_last(x: torch.Tensor, dim: Any = None, *args: Any, **kwargs: Any) -> bool:
    dims = dim if isinstance(dim, tuple | list) else (dim,)
    return len(dims) == 1 and dims[0] in (-1, x.dim() - 1)
