"""Functions of PyTorch that make helper tensors in C++, like an argument: for tensors of a device, they are made there.

C++ takes a device's tensor for one in host memory. The mask of causal attention would so be made in host memory, and refused.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch.utils._pytree import tree_leaves

if TYPE_CHECKING:
    from smp_emulation.checked.patches import Patches
    from smp_emulation.checked.streams.device import Devices

#: Owners and names; PyTorch has most of them in several places.
_FUNCTIONS: tuple[tuple[Any, str], ...] = (
    (F, "scaled_dot_product_attention"),
    (torch._C._nn, "scaled_dot_product_attention"),
    (F, "one_hot"),
    (torch._C._nn, "one_hot"),
    *((owner, name) for name in ("quantile", "nanquantile") for owner in (torch, torch.Tensor)),
    (torch, "combinations"),
    (torch, "vander"),
)


class _Inside(threading.local):
    """State of a thread that is in one of the functions."""

    number: int | None = None


_inside = _Inside()


def install(devices: Devices, patches: Patches) -> None:
    """Wrap the functions."""
    for owner, name in _FUNCTIONS:
        patches.everywhere(owner, name, _wrapped(devices, getattr(owner, name)))


def _wrapped(devices: Devices, own: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(own)
    def call(*args: Any, **kwargs: Any) -> Any:
        tensors = (leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor))
        numbers = (devices.device_of(tensor) for tensor in tensors)
        before, _inside.number = _inside.number, next((number for number in numbers if number is not None), None)
        try:
            return own(*args, **kwargs)
        finally:
            _inside.number = before

    return call


#: Options that C++ passes together, where a Python program names the one that it changes.
_ALL_OPTIONS = {"dtype", "layout", "device"}


def place_factory(func: Any, tensors: list[torch.Tensor], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of an operation; if it makes a tensor inside one of the functions, it makes it on the device.

    The same holds for autograd, which makes ``.grad`` with the options of the parameter. These say "cpu", since the tensors that
    PyTorch sees are host tensors.
    """
    found = dict(kwargs)
    if _is_from_autograd(func, kwargs):
        found.pop("device", None)
        return found
    makes_tensor = "device" in kwargs and not tensors
    if makes_tensor and _inside.number is not None:
        found["device"] = torch.device("cuda", _inside.number)
    return found


def _is_from_autograd(func: Any, kwargs: dict[str, Any]) -> bool:
    if func is not torch.ops.aten.new_empty_strided.default or not kwargs.keys() >= _ALL_OPTIONS:
        return False
    return torch.device(kwargs["device"]).type == "cpu"
