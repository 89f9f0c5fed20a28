"""Comparison of tensors inside rank processes, where importing ``torch.testing`` costs seconds."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def close(got: torch.Tensor, expected: torch.Tensor, what: str = "", tolerance: float = 1e-5) -> None:
    """Equal shapes, and elements equal to ``tolerance``, absolutely or relative to the expected one."""
    if got.shape != expected.shape:
        raise AssertionError(f"{what} has shape {list(got.shape)}, expected {list(expected.shape)}")
    excess = (got.double() - expected.double()).abs() - tolerance * (1 + expected.double().abs())
    if got.numel() and not bool((excess <= 0).all()):
        raise AssertionError(f"{what} is off by {float(excess.max()) + tolerance:.3g} at most, allowed is {tolerance}")
