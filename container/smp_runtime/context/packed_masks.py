"""Transformers 4 makes a mask of tokens × tokens for every causal model; here only samples that are packed have one.

It finds packed samples by their positions, and asks for a mask also if it has found none. Its later versions ask for none then,
and attention is causal by itself. A mask of 262,144 tokens has 64 GiB, on each rank.
"""

from __future__ import annotations

import functools
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

_MODULE, _FUNCTION = "transformers.masking_utils", "find_packed_sequence_indices"


def install() -> None:
    """Let Transformers see that a batch has no packed samples; no effect without it, or if it sees that itself."""
    module = sys.modules.get(_MODULE)
    original = getattr(module, _FUNCTION, None)
    if original is None or hasattr(original, "__wrapped__"):
        return

    @functools.wraps(original)
    def find(*args: Any, **kwargs: Any) -> torch.Tensor | None:
        numbers: torch.Tensor | None = original(*args, **kwargs)
        if numbers is None or bool(numbers[:, -1].any()):  # of the last token's document
            return numbers
        return None

    setattr(module, _FUNCTION, find)
