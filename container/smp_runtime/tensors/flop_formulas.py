"""PyTorch's formulas for the FLOPs of operations, imported without its warning about missing Triton kernels."""

from __future__ import annotations

import logging

_told = logging.getLogger("torch.utils.flop_counter")
_was = _told.disabled
# It warns when it is imported, in every rank whose CUDA is emulated, where there can be no kernels of Triton.
_told.disabled = True
try:
    from torch.utils.flop_counter import flop_registry, sdpa_flop_count
finally:
    _told.disabled = _was

__all__ = ["flop_registry", "sdpa_flop_count"]
