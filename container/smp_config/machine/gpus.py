"""The GPUs of the catalogue: what a model of their type computes and sends, as its maker publishes it.

The facts stand in ``data/gpus.json``, each GPU with its source. Arithmetic is dense and at the peak of the data sheet, in
10^12 operations per second, a multiplication and an addition being two; None where the GPU has no units for a type or
nothing is published. Bandwidths are of one direction, in 10^9 bytes per second.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import lru_cache
from importlib import resources


@dataclass(frozen=True)
class Gpu:
    """One type of GPU.

    Attributes:
        name: as EC2 calls it, ``"A100"``.
        compute_capability: of CUDA, ``"8.0"``.
        dropped_by_cuda: the release of CUDA from which on PyTorch's builds have no code for it; None while all have.
        fp32_tflops: peak in float32, without the shorter type TF32, which PyTorch does not use unless it is asked to.
        fp16_tflops: peak in float16.
        bf16_tflops: peak in bfloat16; None: no units for it, it takes the way over float32.
        nvlink_gb_per_s: between the GPUs of a host that NVLink joins.
        pcie_gb_per_s: of its PCIe interface with all lanes; GPUs that share a switch get less.
        memory_gb_per_s: of its own memory, reading and writing together; an instance may have a model with another.
        source: document and year.
    """

    name: str
    compute_capability: str
    dropped_by_cuda: int | None
    fp32_tflops: float | None
    fp16_tflops: float | None
    bf16_tflops: float | None
    nvlink_gb_per_s: float | None
    pcie_gb_per_s: float
    memory_gb_per_s: float | None
    source: str

    @property
    def has_bf16(self) -> bool:
        """Return whether it has units for bfloat16, which came with compute capability 8.0."""
        return self.capability >= (8, 0)

    @property
    def capability(self) -> tuple[int, int]:
        """Return the compute capability as numbers, for comparison."""
        major, _, minor = self.compute_capability.partition(".")
        return int(major), int(minor)

    def tflops(self, precision: str) -> float | None:
        """Return the peak for ``"fp32"``, ``"fp16"`` or ``"bf16"``; a type without units of its own has float32's."""
        found: dict[str, float | None] = {"fp32": self.fp32_tflops, "fp16": self.fp16_tflops, "bf16": self.bf16_tflops}
        return found[precision] or self.fp32_tflops


@lru_cache(maxsize=1)
def _catalogue() -> dict[str, Gpu]:
    text = resources.files("smp_config").joinpath("data").joinpath("gpus.json").read_text(encoding="utf-8")
    return {name: Gpu(name=name, **row) for name, row in json.loads(text)["gpus"].items()}


def gpu(name: str) -> Gpu:
    """Return the GPU of this name, one of the GPUs of the catalogue's instances.

    Raises:
        KeyError: If no instance of the catalogue has it.
    """
    return _catalogue()[name]


def gpus() -> list[Gpu]:
    """Return every known GPU, ordered by name."""
    return sorted(_catalogue().values(), key=lambda known: known.name)


__all__ = ["Gpu", "gpu", "gpus"]
