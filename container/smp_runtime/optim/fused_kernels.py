"""PyTorch's fused kernels for optimizers that a script has made without asking for any.

On the CPU PyTorch goes through the parameters one by one, with some ten passes over the memory of each; on a GPU it takes its
``foreach`` form, which makes a copy of the parameters on the way. Only an optimizer that was made with ``fused=True`` updates all
by few kernels in one pass: several times as fast on the CPU, almost twice on a GPU.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from smp_runtime.comm.flag_all_reduce import to_device
from smp_runtime.tensors.torch_private import has_step_hooks

#: Optimizers with a fused update for CPU and CUDA since PyTorch 2.4. Not subclasses: they may update differently.
_KINDS = (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD, torch.optim.Adagrad)

#: In bfloat16 the fused form rounds less often than the loop, so that a training would be another one.
_DTYPES = {torch.float32, torch.float64}

#: Devices for which an optimizer's update has a fused form.
_DEVICES = {"cpu", "cuda"}


@contextlib.contextmanager
def fused_where_open(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Let ``optimizer.step()`` use the fused form inside the block, unless its script chose otherwise.

    Afterwards groups are restored and step counters lie on the CPU, so a saved state shows no trace of it.
    ``foreach=False`` or ``fused=False`` at the optimizer's creation keeps PyTorch's own choice.
    """
    groups = [group for group in optimizer.param_groups if type(optimizer) in _KINDS and _is_open(group, optimizer)]
    lent = [step for group in groups for step in _lend_steps(group, optimizer)]
    for group in groups:
        group["fused"] = True
    is_done = False
    try:
        yield
        is_done = True
    finally:
        for group in groups:
            group["fused"] = None
        _take_steps_back(lent, is_done)


def _is_open(group: dict[str, Any], optimizer: torch.optim.Optimizer) -> bool:
    if not _is_form_open(group):
        return False
    trained = [parameter for parameter in group["params"] if parameter.grad is not None]
    if not trained:
        return False
    states = [optimizer.state.get(parameter, {}) for parameter in trained]
    if isinstance(optimizer, torch.optim.SGD) and _differ_in_momentum(group, states):
        return False
    if not _are_states_fusible(trained, states):
        return False
    device = trained[0].device
    if not _has_kernel(optimizer, device):
        return False
    is_counted = not isinstance(optimizer, torch.optim.SGD) and device.type != "cpu"
    if not is_counted:
        return True
    # A hook may remove gradients. Then only the device would know which counters advanced.
    return not has_step_hooks(optimizer)


def _is_form_open(group: dict[str, Any]) -> bool:
    """Return whether a script has chosen no form of the update, and no setting that fused kernels lack."""
    if "fused" not in group:
        return False
    chosen = (group["fused"], group.get("foreach"))
    if chosen != (None, None):
        return False
    if group.get("capturable") or group.get("differentiable"):
        return False
    settings = (group["lr"], *group.get("betas", ()))
    return not any(isinstance(value, torch.Tensor) for value in settings)


def _differ_in_momentum(group: dict[str, Any], states: Sequence[dict[str, Any]]) -> bool:
    """Return whether some parameters have a sum of gradients and others do not.

    SGD's kernel takes one flag for all parameters. A parameter that gets its first gradient later than others has no sum.
    """
    has_sum = {state.get("momentum_buffer") is None for state in states}
    return bool(group["momentum"]) and len(has_sum) > 1


def _are_states_fusible(trained: Sequence[torch.Tensor], states: Sequence[dict[str, Any]]) -> bool:
    steps = [state["step"] for state in states if state.get("step") is not None]
    if not all(map(_is_counter, steps)):
        return False
    # Counters are not among the tensors that must be alike: they are lent to the device for the update.
    kept = itertools.chain.from_iterable(state.items() for state in states)
    tensors = [value for name, value in kept if name != "step" and isinstance(value, torch.Tensor)]
    gradients = [parameter.grad for parameter in trained]
    return are_fusible([*trained, *gradients, *tensors])


def _is_counter(step: Any) -> bool:
    if not isinstance(step, torch.Tensor):
        return False
    return step.dtype is torch.float32 and step.device.type == "cpu"


def _has_kernel(optimizer: torch.optim.Optimizer, device: torch.device) -> bool:
    """Return whether the optimizer has a fused form on the device."""
    if device.type == "cpu" or not isinstance(optimizer, torch.optim.Adagrad):
        return True
    return _has_adagrad_kernel()


@functools.cache
def _has_adagrad_kernel() -> bool:
    """Return whether Adagrad has a fused form for CUDA.

    Releases that support only the CPU state that in their source.
    """
    return "cuda_unsupported" not in inspect.getsource(torch.optim.Adagrad)


def _lend_steps(group: dict[str, Any], optimizer: torch.optim.Optimizer) -> list[tuple[dict[str, Any], torch.Tensor]]:
    """Put counters on the parameters' devices, where the kernels read them; returns states and their counters on the CPU."""
    if isinstance(optimizer, torch.optim.SGD):  # it counts no steps
        return []
    trained = [p for p in group["params"] if p.grad is not None and p.device.type != "cpu"]
    states = [optimizer.state[parameter] for parameter in trained]
    # There is none before the first update: then the optimizer makes it, on the device.
    kept = [state.get("step") for state in states]
    steps = [_first_counter() if step is None else step for step in kept]
    counters = counters_beside(trained, list(map(float, steps)))
    for state, step, counter in zip(states, kept, counters, strict=True):
        if step is not None:
            state["step"] = counter
    return list(zip(states, steps, strict=True))


def _first_counter() -> torch.Tensor:
    return torch.tensor(0.0, dtype=torch.float32, device="cpu")


def _take_steps_back(lent: Sequence[tuple[dict[str, Any], torch.Tensor]], is_done: bool) -> None:
    """Put the counters on the CPU into the states again, one step further if the update is done."""
    steps = []
    for state, step in lent:
        if "step" in state:
            state["step"] = step
            steps.append(step)
    # In place, so that the states have the new counts too.
    if steps and is_done:
        torch._foreach_add_(steps, 1.0)


@torch.no_grad()
def counters_beside(parameters: Sequence[torch.Tensor], values: Sequence[float]) -> list[torch.Tensor]:
    """Return counters of steps for fused kernels, each on its parameter's device; the host does not wait for one.

    Args:
        values: by parameter.
    """
    by_device: dict[torch.device, list[int]] = {}
    for index, parameter in enumerate(parameters):
        by_device.setdefault(parameter.device, []).append(index)
    found: dict[int, torch.Tensor] = {}
    for device, indices in by_device.items():
        wanted = [values[index] for index in indices]
        if len(set(wanted)) == 1:
            made = torch.full((len(wanted),), wanted[0], dtype=torch.float32, device=device)
        else:
            made = to_device(torch.tensor(wanted, dtype=torch.float32, device="cpu"), device)
        found.update(zip(indices, made.unbind(), strict=True))
    return [found[index] for index in range(len(parameters))]


def are_fusible(tensors: Sequence[torch.Tensor | None]) -> bool:
    """Return whether fused kernels take the tensors together; the kernels ignore strides."""
    # Once per update for some thousand tensors, so in one short loop.
    devices, dtypes = set(), set()
    for tensor in tensors:
        if tensor is None or tensor.layout is not torch.strided:
            return False
        if not tensor.is_contiguous():
            return False
        devices.add(tensor.device)
        dtypes.add(tensor.dtype)
    kinds = {device.type for device in devices}
    return len(devices) <= 1 and kinds <= _DEVICES and dtypes <= _DTYPES
