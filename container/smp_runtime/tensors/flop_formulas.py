"""PyTorch's formulas for the FLOPs of operations, imported without its warning about missing Triton kernels."""

from __future__ import annotations

import logging

_told = logging.getLogger("torch.utils.flop_counter")
_was = _told.disabled
# The import warns in every rank with an emulated CUDA device, since no Triton kernels can exist there.
_told.disabled = True
try:
    from torch.utils.flop_counter import flop_registry, sdpa_flop_count
finally:
    _told.disabled = _was

__all__ = ["flop_registry", "sdpa_flop_count"]
