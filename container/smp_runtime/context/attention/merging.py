"""Partial results of attention over blocks of keys, merged by log-sum-exp."""

from __future__ import annotations

from dataclasses import dataclass

import torch


def computing_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the type in which partial results merge: float64 for float64, else float32."""
    return torch.float64 if dtype is torch.float64 else torch.float32


@dataclass
class PartialAttention:
    """Attention over some keys.

    The log-sum-exp of the scores is ``top + log(total)``. They are kept apart, since scores of -1e38 leave no digits for the
    number of keys.

    Attributes:
        out: ``[batch, heads, rows, width]``; 0 where a row attends to none of the keys.
        top: ``[batch, heads, rows, 1]``; -inf where a row attends to none.
        total: as ``top``; 0 where a row attends to none.
    """

    out: torch.Tensor
    top: torch.Tensor
    total: torch.Tensor

    @classmethod
    def empty(cls, q: torch.Tensor, width: int) -> PartialAttention:
        """Return the result over no keys."""
        dtype = computing_dtype(q.dtype)
        batch, heads, rows = q.shape[:3]
        # As PyTorch's operators lay it out: models join the heads of each row next, which needs no copy then.
        out = q.new_zeros(batch, rows, heads, width, dtype=dtype).transpose(1, 2)
        top = q.new_full((*q.shape[:3], 1), -torch.inf, dtype=dtype)
        return cls(out, top, torch.zeros_like(top))

    def add(self, rows: slice, part: PartialAttention) -> None:
        """Merge the result of some rows over further keys."""
        out, top, total = (each[:, :, rows] for each in (self.out, self.top, self.total))
        highest = torch.maximum(top, part.top)
        reference = highest.masked_fill(highest == -torch.inf, 0.0)
        before = total * (top - reference).exp()
        added = part.total * (part.top - reference).exp()
        both = before + added
        divisor = both.masked_fill(both == 0, 1.0)
        out.mul_(before / divisor).add_(part.out * (added / divisor))
        top.copy_(highest)
        total.copy_(both)

    def add_sinks(self, sinks: torch.Tensor) -> None:
        """Merge a key of value 0 with one score per head, ``[heads]``, to which each row attends."""
        top = sinks.to(self.top.dtype)[:, None, None].expand_as(self.top)
        self.add(slice(None), PartialAttention(torch.zeros_like(self.out), top, torch.ones_like(self.total)))

    def logsumexp(self) -> torch.Tensor:
        """Return the log-sum-exp of the scores, ``[batch, heads, rows]``; 0 for rows that attend to nothing, as the operators."""
        found = self.top + self.total.log()
        return found.masked_fill(self.total == 0, 0.0)[..., 0]
