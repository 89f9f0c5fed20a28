"""Modules of ``transformer_engine.pytorch`` where it is not installed: PyTorch's, with its arguments."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from smp_runtime.errors import SMPUserError
from smp_runtime.fp8.current import find_call
from smp_version2.layer_classes import MemberClass, noted_blocks

#: Arguments that choose kernels or where tensors lie in them, and change no results.
_WITHOUT_EFFECT = frozenset(
    {"fuse_wgrad_accumulation", "get_rng_state_tracker", "ub_overlap_ag", "ub_overlap_rs", "ub_name"}
)


def _refuse(kind: str, options: dict[str, Any]) -> None:
    """Raise an error for arguments that would change results."""
    asked = sorted(name for name, value in options.items() if value and name not in _WITHOUT_EFFECT)
    if asked:
        raise SMPUserError(
            f"{kind} got {', '.join(asked)}, and transformer_engine is not installed: install it, or leave them out and split the "
            "model by tensor_parallel_degree and tsm.transform",
            code="SMP321",
        )


class Linear(nn.Linear):
    """A linear map, whose products are in 8 bits inside ``fp8_autocast``.

    Args:
        init_method: fills the weight; None for PyTorch's way.
        return_bias: return output and bias, which is not added then.
        params_dtype: type of the parameters.
        options: arguments of parallel linear maps, which must be off.
    """

    multiplies_rows = True

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        init_method: Callable[[torch.Tensor], Any] | None = None,
        return_bias: bool = False,
        params_dtype: torch.dtype | None = None,
        device: Any = None,
        tp_size: int = 1,
        **options: Any,
    ) -> None:
        _refuse("transformer_engine.pytorch.Linear", options | ({"tp_size": tp_size} if tp_size > 1 else {}))
        super().__init__(in_features, out_features, bias, _usable(device), params_dtype)
        self.return_bias = return_bias
        if init_method is not None:
            with torch.no_grad():
                init_method(self.weight)

    def forward(self, input: torch.Tensor) -> Any:
        """Return the output, with the bias beside it if that is to be returned."""
        product = find_call(self) or nn.functional.linear
        if self.return_bias:
            return product(input, self.weight, None), self.bias
        return product(input, self.weight, self.bias)


class LayerNorm(nn.LayerNorm):
    """A layer norm, computed in the type of its input.

    Args:
        zero_centered_gamma: the weight is stored less 1.
    """

    def __init__(
        self,
        hidden_size: int,
        eps: float = 1e-5,
        sequence_parallel: bool = False,
        params_dtype: torch.dtype | None = None,
        zero_centered_gamma: bool = False,
        device: Any = None,
    ) -> None:
        _refuse("transformer_engine.pytorch.LayerNorm", {"sequence_parallel": sequence_parallel})
        super().__init__(hidden_size, eps, device=_usable(device), dtype=params_dtype)
        self.zero_centered_gamma = zero_centered_gamma
        if zero_centered_gamma:
            nn.init.zeros_(self.weight)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Return the normalized input."""
        weight = 1 + self.weight if self.zero_centered_gamma else self.weight
        return nn.functional.layer_norm(input, self.normalized_shape, weight, self.bias, self.eps)


class RMSNorm(nn.RMSNorm):
    """A norm by the root mean square, computed in the type of its input."""

    def __init__(self, hidden_size: int, eps: float = 1e-5, device: Any = None, **options: Any) -> None:
        dtype = options.pop("params_dtype", None)
        _refuse("transformer_engine.pytorch.RMSNorm", options)
        super().__init__(hidden_size, eps, device=_usable(device), dtype=dtype)


class LayerNormLinear(nn.Module):
    """A norm and a linear map of its output.

    Args:
        normalization: ``LayerNorm`` or ``RMSNorm``.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        eps: float = 1e-5,
        bias: bool = True,
        normalization: str = "LayerNorm",
        params_dtype: torch.dtype | None = None,
        device: Any = None,
        **options: Any,
    ) -> None:
        super().__init__()
        kinds: dict[str, type[LayerNorm] | type[RMSNorm]] = {"LayerNorm": LayerNorm, "RMSNorm": RMSNorm}
        if normalization not in kinds:
            raise SMPUserError(
                f"normalization is {normalization!r}; use {' or '.join(map(repr, kinds))}", code="SMP321"
            )
        self.norm = kinds[normalization](in_features, eps, params_dtype=params_dtype, device=device)
        self.linear = Linear(in_features, out_features, bias, params_dtype=params_dtype, device=device, **options)

    def forward(self, input: torch.Tensor) -> Any:
        """Return the linear map of the normalized input."""
        return self.linear(self.norm(input))


class LayerNormMLP(nn.Module):
    """A name for ``isinstance``, as peft asks of every layer. There are no such modules, and none can be made."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        raise SMPUserError(
            "transformer_engine is not installed, and what stands in for it has no LayerNormMLP: install it, or use PyTorch's "
            "modules, whose nn.Linear multiply in 8 bits inside fp8_autocast",
            code="SMP321",
        )


def _usable(device: Any) -> Any:
    """Return a device; scripts name the GPU as in transformer_engine's own default, also on machines without one."""
    is_missing = device is not None and torch.device(device).type == "cuda" and not torch.cuda.is_available()
    return None if is_missing else device


class MultiheadAttention(metaclass=MemberClass):
    """Stands for the attention of transformed models' blocks in ``isinstance``, for scripts that recompute it."""

    @staticmethod
    def members() -> Iterable[nn.Module]:
        """Return all modules that count as instances."""
        return {
            module
            for block in noted_blocks()
            for module in block.modules()
            if type(module).__name__.endswith("Attention")
        }
