"""PyTorch's fused kernels for optimizers that a script has made without asking for any.

On a GPU PyTorch itself updates all parameters of an optimizer by few kernels. On the CPU it goes through them one by one, with some
ten passes over the memory of each, unless the optimizer was made with ``fused=True``: one pass, several times as fast.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch

#: Those whose update has a fused form for the CPU since PyTorch 2.4, and is the class's own.
_KINDS = (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD, torch.optim.Adagrad)

#: In bfloat16 the fused form rounds less often than the loop, so that a training would be another one.
_DTYPES = (torch.float32, torch.float64)


@contextlib.contextmanager
def fused_where_open(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Inside, ``optimizer.step()`` takes the fused form where its script has left that open.

    Groups are as they were afterwards, so that a saved state says nothing of it. ``foreach=False`` or ``fused=False`` at the
    optimizer's creation keeps PyTorch's loop.
    """
    groups = [group for group in optimizer.param_groups if type(optimizer) in _KINDS and _is_open(group, optimizer)]
    for group in groups:
        group["fused"] = True
    try:
        yield
    finally:
        for group in groups:
            group["fused"] = None


def _is_open(group: dict[str, Any], optimizer: torch.optim.Optimizer) -> bool:
    if "fused" not in group or group["fused"] is not None or group.get("foreach") is not None:
        return False
    if group.get("capturable") or group.get("differentiable") or isinstance(group["lr"], torch.Tensor):
        return False
    trained = [parameter for parameter in group["params"] if parameter.grad is not None]
    if not trained:
        return False
    tensors = [tensor for parameter in trained for tensor in (parameter, parameter.grad)]
    for parameter in trained:
        state = optimizer.state.get(parameter) or {}
        tensors += [value for name, value in state.items() if isinstance(value, torch.Tensor) and name != "step"]
        step = state.get("step")
        if isinstance(step, torch.Tensor) and (step.dtype is not torch.float32 or step.device.type != "cpu"):
            return False
    return are_fusible(tensors)


def are_fusible(tensors: Sequence[torch.Tensor | None]) -> bool:
    """Whether the fused kernels of the CPU take them: they walk through memory, whatever strides say."""
    return all(
        tensor is not None
        and tensor.device.type == "cpu"
        and tensor.layout is torch.strided
        and tensor.dtype in _DTYPES
        and tensor.is_contiguous()
        for tensor in tensors
    )
