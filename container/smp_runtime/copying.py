"""Copies of nested values."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._pytree import tree_map


def unshared(value: Any) -> Any:
    """An object whose tensors do not lie in a mapped file any more, wherever they are in it."""
    return tree_map(lambda leaf: leaf.clone() if isinstance(leaf, torch.Tensor) else leaf, value)
