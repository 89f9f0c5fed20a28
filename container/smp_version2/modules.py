"""Functions on modules that scripts of version 2 call."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import nn


def empty_module_params(
    module: nn.Module, device: torch.device | str | int | None = None, recurse: bool = False
) -> nn.Module:
    """Give a module's parameters memory without values, and return it.

    Args:
        device: where; None keeps each parameter's own device.
        recurse: whether the modules inside are meant, too.
    """
    parts = module.modules() if recurse else [module]
    for part in parts:
        for name, parameter in list(part._parameters.items()):
            if parameter is None:
                continue
            where = parameter.device if device is None else device
            made = torch.empty_like(parameter, device=where)
            part._parameters[name] = type(parameter)(made, parameter.requires_grad)
    return module


def move_buffers_to_device(module: nn.Module, device: torch.device | str | int, recurse: bool = False) -> nn.Module:
    """Move a module's buffers to a device, and return the module; parameters stay where they are.

    Args:
        recurse: whether the modules inside are meant, too.
    """
    parts = module.modules() if recurse else [module]
    for part in parts:
        for name, buffer in list(part._buffers.items()):
            if buffer is not None:
                part._buffers[name] = buffer.to(device)
    return module
