"""Kernels of a transformer on this machine's GPU, or on its processor without one, and a rate card of what they reach."""

from __future__ import annotations

import os
import platform
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F

import smp_emulation
from smp_config.machine.emulation import seed_of_checks
from smp_records.rate_card import LAUNCH_SECONDS, Link, RateCard

#: Types whose rates are measured.
_TYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


@dataclass(frozen=True)
class KernelSizes:
    """Sizes of the measured kernels.

    Attributes:
        products: rows, inner and columns of matrix products.
        lengths: sequences of attention.
        heads, width: of attention.
        elements: of the tensors that are added.
    """

    products: tuple[tuple[int, int, int], ...]
    lengths: tuple[int, ...]
    heads: int
    width: int
    elements: int


#: Layers of models of 1, 8 and 70 billion parameters on a GPU; a processor or an emulated GPU shows only that everything runs.
ON_GPU = KernelSizes(
    ((8192, 2048, 8192), (8192, 4096, 4096), (8192, 4096, 14_336), (8192, 8192, 3584)), (2048, 8192), 32, 128, 2**27
)
SMALL = KernelSizes(((128, 128, 512), (128, 256, 256)), (128, 256), 2, 32, 2**18)


class Stopwatch:
    """Measures calls on a device.

    Args:
        device: that computes.
        seconds: that one measurement may take.
    """

    def __init__(self, device: torch.device, seconds: float) -> None:
        self._device = device
        self._seconds = seconds

    def wait(self) -> None:
        """Wait until the device has done its work."""
        # Calls only queue their kernels.
        if self._device.type == "cuda":
            torch.cuda.synchronize()

    def seconds_of(self, run: Callable[[], object], calls: int = 5) -> float:
        """Return the median seconds of a call, over groups of ``calls`` calls without a wait between them."""
        run()
        self.wait()
        found: list[float] = []
        end = time.perf_counter() + self._seconds
        while len(found) < 3 or (time.perf_counter() < end and len(found) < 200):
            begin = time.perf_counter()
            for _ in range(calls):
                run()
            self.wait()
            found.append((time.perf_counter() - begin) / calls)
        return statistics.median(found)


def calibrate(seconds: float, instance_type: str | None = None) -> RateCard:
    """Return the rates of this machine.

    Args:
        seconds: of all measurements, about; a first call of a kernel may take longer.
        instance_type: whose links between GPUs and hosts, memory and price the card gets, as one GPU measures none.
    """
    has_gpu = torch.cuda.is_available()
    device = torch.device("cuda" if has_gpu else "cpu")
    # A variable with 0 turns the emulation off, and one with 1 has no effect where a GPU is.
    is_checked = seed_of_checks(os.environ) is not None
    is_real = has_gpu and not (smp_emulation.is_active() or is_checked)
    sizes = ON_GPU if is_real else SMALL
    # Products of each type, attention, memory, launches, copies.
    kinds = len(_TYPES) * len(sizes.products) + len(sizes.lengths) + 3
    each = seconds / kinds if is_real else min(0.05, seconds / kinds)
    watch = Stopwatch(device, each)
    rates = {name: _product_rate(watch, sizes, device, dtype) for name, dtype in _TYPES.items()}
    attention = _attention_rate(watch, sizes, device)
    summands = [torch.ones(sizes.elements, device=device) for _ in range(3)]
    added = watch.seconds_of(lambda: torch.add(summands[0], summands[1], out=summands[2]))
    tiny = torch.ones(1, device=device)
    launch = watch.seconds_of(lambda: tiny.add_(1), calls=100) if is_real else LAUNCH_SECONDS
    name = torch.cuda.get_device_name() if has_gpu else platform.processor() or platform.machine()
    kind = "measured by smp-estimator calibrate" + (
        "" if is_real else ", without a GPU: the figures are not those of one"
    )
    base = None if instance_type is None else RateCard.of_instance(instance_type)
    return RateCard(
        name=f"{name}, calibrated",
        device_bytes=torch.cuda.get_device_properties(0).total_memory if has_gpu else None,
        gpus_per_host=1 if base is None else base.gpus_per_host,
        flops_per_second=rates,
        matrix_part=1.0,
        attention_part=min(1.0, attention / rates["bfloat16"]),
        memory_bytes_per_second=3 * 4 * sizes.elements / added,
        memory_part=1.0,
        launch_seconds=launch,
        inside=None if base is None else base.inside,
        between=None if base is None else base.between,
        host=Link(bytes_per_second=_copy_rate(watch, sizes, device)),
        usd_per_hour=None if base is None else base.usd_per_hour,
        sources=(
            f"matrix products, attention, memory, launches and copies: {kind}, PyTorch {torch.__version__}",
            "links: none, as one GPU measures none"
            if base is None
            else f"links and price: the catalogue's {instance_type}",
        ),
    )


def _product_rate(watch: Stopwatch, sizes: KernelSizes, device: torch.device, dtype: torch.dtype) -> float:
    """Return the operations per second of all products together."""
    operations = seconds = 0.0
    for rows, inner, columns in sizes.products:
        left = torch.randn(rows, inner, device=device).to(dtype)
        right = torch.randn(columns, inner, device=device).to(dtype)
        operations += 2.0 * rows * inner * columns
        seconds += watch.seconds_of(lambda left=left, right=right: F.linear(left, right))  # type: ignore[misc]
    return operations / seconds


def _attention_rate(watch: Stopwatch, sizes: KernelSizes, device: torch.device) -> float:
    """Return the operations per second of causal attention, forward and backward; masked halves do not count."""
    operations = seconds = 0.0
    for length in sizes.lengths:
        shape = (1, sizes.heads, length, sizes.width)
        inputs = [torch.randn(shape, device=device).to(torch.bfloat16).requires_grad_() for _ in range(3)]
        gradient = torch.ones(shape, device=device).to(torch.bfloat16)

        def attend(inputs: list[torch.Tensor] = inputs, gradient: torch.Tensor = gradient) -> None:
            queries, keys, values = inputs
            result = F.scaled_dot_product_attention(queries, keys, values, is_causal=True)
            torch.autograd.grad(result, inputs, gradient)

        # Two products in forward and five in backward, each of 2·s²/2 operations per element of a head.
        operations += 7.0 * length * length * sizes.heads * sizes.width
        seconds += watch.seconds_of(attend)
    return operations / seconds


def _copy_rate(watch: Stopwatch, sizes: KernelSizes, device: torch.device) -> float:
    source = torch.ones(sizes.elements // 4, pin_memory=device.type == "cuda")
    target = torch.empty(sizes.elements // 4, device=device)
    return sizes.elements / watch.seconds_of(lambda: target.copy_(source, non_blocking=True))
