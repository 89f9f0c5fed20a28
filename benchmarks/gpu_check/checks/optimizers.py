"""Updates of the optimizer against PyTorch's own, without forward and backward."""

from __future__ import annotations

import gc
import statistics
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

import smdistributed.modelparallel.torch as smp
from gpu_check.device import get_device, is_real, shut_down, synchronize, time_run
from gpu_check.measurements import count_host_waits, count_rounds, to_ms
from gpu_check.models import MixedPrecision, get_shape, make_gpt
from gpu_check.results import Finding, case

_DYNAMIC = {"dynamic_loss_scale": True}
_CASES: dict[str, tuple[dict[str, Any], bool | None, dict[str, Any]]] = {
    # name: configuration, whether AdamW is fused, options of the wrapped optimizer
    "float32 weights, default": ({}, None, {}),
    "float32 weights, fused": ({}, True, {}),
    "bf16, default": ({"bf16": True}, None, {}),
    "bf16, fused": ({"bf16": True}, True, {}),
    "fp16, fused, dynamic scale": ({"fp16": True}, True, _DYNAMIC),
}
_SCALE = 65536.0
#: Bytes of a parameter that an update moves: the float32 weight, two moments and the gradient are read, three are written.
_BYTES_MOVED = 28
#: Memory bandwidth of an H100, about, in bytes per second.
_BANDWIDTH = 3.0e12


def check_optimizer() -> None:
    """Time updates by AdamW of both sides."""
    for name, (config, fused, options) in _CASES.items():
        if fused and not is_real():
            continue
        with case(name) as finding:
            numbers = _measure_ours(finding, config, fused, options)
            finding["peer_ms"] = _measure_peer(config, fused)
            finding["ratio"] = round(finding["ours_ms"] / finding["peer_ms"], 3)
            finding["floor_ms_at_3TBs"] = to_ms(numbers * _BYTES_MOVED / _BANDWIDTH, 3)
            gc.collect()


def _measure_ours(finding: Finding, config: dict[str, Any], fused: bool | None, options: dict[str, Any]) -> int:
    """Add the time and host waits of an update to a finding; return the number of parameters."""
    smp.init(config)
    with get_device():
        model = smp.DistributedModel(make_gpt(get_shape("350M")))
    optimizer = smp.DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=1e-4, fused=fused), **options)
    parameters = list(model.parameters())
    finding["ours_ms"] = _time_updates(optimizer.step, parameters)
    _fill_gradients(parameters)
    finding |= count_host_waits(optimizer.step, ("smp_runtime",), 3)
    numbers = sum(parameter.numel() for parameter in parameters)
    shut_down()
    return numbers


def _measure_peer(config: dict[str, Any], fused: bool | None) -> float:
    with get_device():
        model = make_gpt(get_shape("350M"))

    def make(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.AdamW(parameters, lr=1e-4, fused=fused)

    if "bf16" in config:
        optimizer: Any = MixedPrecision(model, make, torch.bfloat16)
    elif "fp16" in config:
        optimizer = MixedPrecision(model, make, torch.float16, scale=_SCALE)
    else:
        optimizer = make(model.parameters())
    return _time_updates(optimizer.step, list(model.parameters()))


def _fill_gradients(parameters: Sequence[nn.Parameter]) -> None:
    for parameter in parameters:
        parameter.grad = torch.full_like(parameter, 1e-3)


def _time_updates(step: Callable[[], object], parameters: Sequence[nn.Parameter]) -> float:
    """Return the median milliseconds of an update; each finds new gradients."""
    times = []
    for _ in range(count_rounds(10) + 2):
        _fill_gradients(parameters)
        synchronize()
        times.append(time_run(step))
    return to_ms(statistics.median(times[2:]), 3)
