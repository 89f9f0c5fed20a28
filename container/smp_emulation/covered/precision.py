"""Mixed precision: autocast and gradient scalers that are asked for CUDA work on the CPU."""

from __future__ import annotations

import functools
from typing import Any

import torch

from smp_emulation.calls import CoveredCall, answer_with
from smp_emulation.devices import kind_here


def _autocast_init(original: Any) -> Any:
    @functools.wraps(original)
    def init(
        self: Any,
        device_type: str,
        dtype: torch.dtype | None = None,
        enabled: bool = True,
        cache_enabled: bool | None = None,
    ) -> None:
        kind = kind_here(device_type)
        if kind != device_type and dtype is None:
            dtype = _cuda_dtype()
        # The CPU casts to the two half types only. For a third type, a GPU reports nothing if autocast is off.
        original(self, kind, dtype=dtype, enabled=enabled, cache_enabled=cache_enabled)

    return init


#: PyTorch's own answers for "cuda"; saved before these functions are redirected to the CPU.
_get_autocast_dtype = torch.get_autocast_dtype
_is_autocast_enabled = torch.is_autocast_enabled


def _cuda_dtype() -> torch.dtype:
    return _get_autocast_dtype("cuda")


def _is_enabled(original: Any) -> Any:
    @functools.wraps(original)
    def is_autocast_enabled(device_type: str = "cuda") -> bool:
        return bool(original(kind_here(device_type)))

    return is_autocast_enabled


def _dtype(original: Any) -> Any:
    @functools.wraps(original)
    def get_autocast_dtype(device_type: str) -> torch.dtype:
        kind = kind_here(device_type)
        if kind != device_type and not _is_autocast_enabled(kind):
            kind = device_type
        return original(kind)

    return get_autocast_dtype


def _gpu_dtype(original: Any) -> Any:
    @functools.wraps(original)
    def get_autocast_gpu_dtype() -> torch.dtype:
        return torch.get_autocast_dtype("cuda")

    return get_autocast_gpu_dtype


def _set_enabled(original: Any) -> Any:
    @functools.wraps(original)
    def set_autocast_enabled(*args: Any) -> None:
        device_type, enabled = args if len(args) == 2 else ("cuda", *args)
        original(kind_here(device_type), enabled)

    return set_autocast_enabled


def _set_dtype(original: Any) -> Any:
    @functools.wraps(original)
    def set_autocast_dtype(device_type: str, dtype: torch.dtype) -> None:
        original(device_type, dtype)
        if kind_here(device_type) != device_type:
            original(kind_here(device_type), dtype)

    return set_autocast_dtype


def _scaler_init(original: Any) -> Any:
    @functools.wraps(original)
    def init(self: Any, device: str = "cuda", *args: Any, **kwargs: Any) -> None:
        original(self, kind_here(device), *args, **kwargs)

    return init


def _custom(original: Any) -> Any:
    @functools.wraps(original)
    def custom(*args: Any, **kwargs: Any) -> Any:
        if "device_type" in kwargs:
            kwargs["device_type"] = kind_here(kwargs["device_type"])
        return original(*args, **kwargs)

    return custom


CALLS = (
    CoveredCall(
        "torch.amp.autocast_mode.autocast.__init__", "the CPU's autocast, with the same element type", _autocast_init
    ),
    CoveredCall("torch.amp.GradScaler.__init__", "a scaler for the CPU", _scaler_init),
    CoveredCall("torch.amp.custom_fwd", "acts in the CPU's autocast", _custom),
    CoveredCall("torch.amp.custom_bwd", "acts in the CPU's autocast", _custom),
    CoveredCall("torch.is_autocast_enabled", "the CPU's autocast", _is_enabled),
    CoveredCall("torch.get_autocast_dtype", "the CPU's autocast", _dtype),
    CoveredCall("torch.get_autocast_gpu_dtype", "the CPU's autocast", _gpu_dtype),
    CoveredCall("torch.set_autocast_enabled", "the CPU's autocast", _set_enabled),
    CoveredCall("torch.set_autocast_dtype", "the CPU's autocast", _set_dtype),
    answer_with("torch.cuda.amp.common.amp_definitely_not_available", "False", lambda: False),
)
