"""Kernels that a step launches, and the time that host and device need for them, by simple constants."""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

#: Seconds of the host for the launch of a kernel alone: the least that a step can take per kernel.
LAUNCH_SECONDS = 5e-6
#: Seconds of the host per kernel of a step in eager mode, with Python, autograd and the optimizer. A 350M GPT on the host of an
#: H100 needs 22 µs (31.2 ms for 1,415 kernels in plain PyTorch) to 30 µs (34.6 ms for 1,139); see ``benchmarks/gpu``.
EAGER_SECONDS = 25e-6
#: Of the device: bytes and floating point operations per second, about those of an H100 in bfloat16, and the part that
#: kernels reach: by these rates that GPT needs 34.8 ms, and the GPU computes for 49 ms.
BYTES_PER_SECOND, FLOPS_PER_SECOND, REACHED = 3e12, 800e12, 0.7

#: A kernel over a list takes so many tensors at most, by the number of its lists, and so many blocks of elements.
_TENSORS_PER_LAUNCH = (110, 64, 48, 36, 30)
_ELEMENTS_PER_LAUNCH = 320 * 65536

_aten = torch.ops.aten

#: Operations that read a part of their first argument only.
_READS_ROWS = {_aten.embedding, _aten.index_select, _aten.gather, _aten.index}
_WITHOUT_KERNEL = {
    *(_aten.empty, _aten.empty_strided, _aten.empty_like, _aten.new_empty, _aten.new_empty_strided),
    *(_aten.set_, _aten.resize_, _aten._fused_sdp_choice, _aten._unsafe_view),
    *(_aten._local_scalar_dense, _aten.is_same_size),
}


@dataclass
class StepWork:
    """Launches since the last step, and seconds of the device.

    Attributes:
        copies: copies between host and device, which take no kernel.
        flops: floating point operations of matrix products, convolutions and attention.
        moved: bytes that kernels read and write.
    """

    launches: int = 0
    copies: int = 0
    flops: float = 0.0
    moved: float = 0.0
    device_seconds: float = 0.0

    @property
    def launch_seconds(self) -> float:
        """Return the seconds of the host for launches alone."""
        return self.launches * LAUNCH_SECONDS

    @property
    def eager_seconds(self) -> float:
        """Return the seconds of the host in eager mode."""
        return self.launches * EAGER_SECONDS

    @property
    def bound(self) -> str:
        """Return what the step waits for.

        Returns:
            ``"host"`` if launches alone take longer than the device, ``"host in eager mode"`` if the eager host does, else
            ``"device"``.
        """
        if self.launch_seconds > self.device_seconds:
            return "host"
        return "host in eager mode" if self.eager_seconds > self.device_seconds else "device"

    def add(
        self, function: Any, args: Any, kwargs: Any, given: Sequence[torch.Tensor], made: Sequence[torch.Tensor]
    ) -> None:
        """Count an operation of a device.

        Args:
            function: the overload of the operation.
            given: the tensors among its arguments.
            made: its new tensors.
        """
        packet = function.overloadpacket
        if packet in _WITHOUT_KERNEL:
            return
        written = sum(tensor.nbytes for tensor in made) + _overwritten_bytes(function, args, kwargs)
        moved = 2 * written if packet in _READS_ROWS else written + sum(tensor.nbytes for tensor in given)
        self.add_kernel(moved, _count_flops(packet, args, kwargs, made), count_launches(function, args, given))

    def add_kernel(self, moved: float, flops: float = 0.0, launches: int = 1) -> None:
        """Count kernels that move so many bytes and do so many floating point operations together."""
        self.launches += launches
        self.flops += flops
        self.moved += moved
        self.device_seconds += max(moved / BYTES_PER_SECOND, flops / FLOPS_PER_SECOND) / REACHED


def count_launches(function: Any, args: Sequence[Any], given: Sequence[torch.Tensor]) -> int:
    """Return the kernels of an operation: one, or more for lists of tensors."""
    is_of_lists = function.__name__.startswith(("_foreach", "_fused", "_amp_foreach"))
    if not is_of_lists:
        return 1
    lists = []
    for arg in args:
        is_list = isinstance(arg, (list, tuple)) and len(arg) > 0
        if is_list and isinstance(arg[0], torch.Tensor):
            lists.append(arg)
    if not lists:
        return 1
    first = lists[0]
    most = _TENSORS_PER_LAUNCH[min(len(lists), len(_TENSORS_PER_LAUNCH)) - 1]
    by_number = math.ceil(len(first) / most)
    by_size = math.ceil(sum(tensor.numel() for tensor in first) / _ELEMENTS_PER_LAUNCH)
    return max(1, by_number, by_size)


def _overwritten_bytes(function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> int:
    """Return the bytes of the arguments that an operation writes into."""
    found = 0
    for position, name in _written_places(function):
        if position < len(args):
            value = args[position]
        else:
            value = kwargs.get(name)
        written = value if isinstance(value, (list, tuple)) else (value,)
        for tensor in written:
            if isinstance(tensor, torch.Tensor):
                found += tensor.nbytes
    return found


@functools.cache
def _written_places(function: Any) -> tuple[tuple[int, str], ...]:
    """Return position and name of each argument that an operation writes into."""
    arguments = enumerate(function._schema.arguments)
    return tuple(
        (position, argument.name)
        for position, argument in arguments
        if argument.alias_info is not None and argument.alias_info.is_write
    )


def _count_flops(packet: Any, args: Any, kwargs: Any, made: Sequence[torch.Tensor]) -> float:
    formula = _formulas().get(packet)
    if formula is None:
        return 0.0
    if packet is _aten.convolution_backward:
        result: Any = args[1], args[2], None  # gradients have the shapes of input and weight; some may be left out
    else:
        result = made[0] if len(made) == 1 else tuple(made)
    return float(formula(*args, **kwargs, out_val=result))


@functools.cache
def _formulas() -> dict[Any, Callable[..., Any]]:
    """Return PyTorch's formulas, with those of the CPU's attention.

    Their module warns about missing Triton kernels when it is imported; here are none.
    """
    log = logging.getLogger("torch.utils.flop_counter")
    was, log.disabled = log.disabled, True
    try:
        from torch.utils import flop_counter
    finally:
        log.disabled = was

    def attention(query: Any, key: Any, value: Any, *args: Any, **kwargs: Any) -> int:
        return int(flop_counter.sdpa_flop_count(query.shape, key.shape, value.shape))

    def attention_backward(grad: Any, query: Any, key: Any, value: Any, *args: Any, **kwargs: Any) -> int:
        return int(flop_counter.sdpa_backward_flop_count(grad.shape, query.shape, key.shape, value.shape))

    return {
        **flop_counter.flop_registry,
        _aten._scaled_dot_product_flash_attention_for_cpu: attention,
        _aten._scaled_dot_product_flash_attention_for_cpu_backward: attention_backward,
    }
