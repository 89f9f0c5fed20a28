"""Names for PyTorch."""

from smp_runtime.fp8.autocast import checkpoint, fp8_autocast
from smp_version2.eight_bits.modules import (
    LayerNorm,
    LayerNormLinear,
    LayerNormMLP,
    Linear,
    MultiheadAttention,
    RMSNorm,
)
from smp_version2.eight_bits.names import missing_name

from . import attention, distributed, fp8

__all__ = [
    "LayerNorm",
    "LayerNormLinear",
    "LayerNormMLP",
    "Linear",
    "MultiheadAttention",
    "RMSNorm",
    "attention",
    "checkpoint",
    "distributed",
    "fp8",
    "fp8_autocast",
]

__getattr__ = missing_name
