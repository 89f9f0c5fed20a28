"""What PyTorch keeps private of modules."""

# ruff: noqa: SLF001 - this folder is the place for private names

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from smp_runtime.tensors.torch_private.lookup import find_private

#: ``(module, *args, **kwargs)``: a module's call with its hooks. It bypasses a ``__call__`` of its class.
call_with_hooks: Callable[..., Any] = find_private("calls modules for other stages", "nn.Module._wrapped_call_impl")

#: Classes of modules that keep running statistics and may count batches while they train.
NORMS_WITH_STATISTICS: type | tuple[type, ...] = getattr(nn.modules.batchnorm, "_NormBase", None) or (
    nn.modules.batchnorm._BatchNorm,
    nn.modules.instancenorm._InstanceNorm,
)

#: What ``load_state_dict`` returns, from the missing and the unexpected names.
IncompatibleKeys: Callable[[list[str], list[str]], Any] = type(nn.Module().load_state_dict({}))


def before_loading(module: nn.Module, hook: Callable[..., None]) -> None:
    """Call ``hook(module, state_dict, prefix, …)`` before a module takes its part of a state."""
    if hasattr(nn.Module, "register_load_state_dict_pre_hook"):  # since PyTorch 2.5
        module.register_load_state_dict_pre_hook(hook)
    else:
        module._register_load_state_dict_pre_hook(hook, with_module=True)


_parse_to: Callable[..., Any] = find_private("reads the arguments of DistributedModel.to", "_C._nn._parse_to")


def dtype_asked_for(*args: Any, **kwargs: Any) -> torch.dtype | None:
    """Return the dtype among the arguments of ``Module.to``, or None.

    Raises:
        TypeError, RuntimeError: it takes no such arguments.
    """
    dtype: torch.dtype | None = _parse_to(*args, **kwargs)[1]
    return dtype


def device_asked_for(*args: Any, **kwargs: Any) -> torch.device | None:
    """Return the device among the arguments of ``Module.to``, or None."""
    device: torch.device | None = _parse_to(*args, **kwargs)[0]
    return device


def activation_wrappers() -> Any:
    """Return the module with the classes of modules that PyTorch has wrapped to checkpoint or offload them."""
    return importlib.import_module("torch.distributed.algorithms._checkpoint.checkpoint_wrapper")
