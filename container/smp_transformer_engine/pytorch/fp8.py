"""The context of FP8."""

from smp_runtime.fp8.autocast import fp8_autocast, is_fp8_available

__all__ = ["fp8_autocast", "is_fp8_available"]
