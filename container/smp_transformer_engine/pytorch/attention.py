"""The attention of transformed models, for ``isinstance``."""

from smp_version2.eight_bits.modules import MultiheadAttention

__all__ = ["MultiheadAttention"]
