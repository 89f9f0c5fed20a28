"""PyTorch's formulas of how much operations compute, imported without its warning that Triton's kernels are not among them."""

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
