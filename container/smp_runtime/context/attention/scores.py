"""What is done to the scores of a block: which rows attend to which keys, what is added, what drops out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from smp_runtime.context.attention.plan import AttentionCall, CallKind, KeyBlock

if TYPE_CHECKING:
    from smp_runtime.context.attention.bounds import KeyBounds
    from smp_runtime.context.attention.positions import HeldPositions


@dataclass(frozen=True)
class PositionalDropout:
    """Dropout of attention weights by position, so that it is the same however a sequence is divided.

    Args:
        probability: of a weight to be dropped.
        seed: the same on all ranks.
        first_head: number of the first head that this rank computes.
        heads: of the whole attention.
    """

    probability: float
    seed: int
    first_head: int
    heads: int

    def factors(self, batch: int, heads: int, rows: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
        """Return 0 or ``1 / (1 - probability)`` for each weight, ``[batch, heads, rows, keys]``.

        Args:
            rows, keys: their positions.
        """
        sample = torch.arange(batch, device=rows.device)[:, None]
        head = torch.arange(self.first_head, self.first_head + heads, device=rows.device)
        seed = self.seed & _WORD, (self.seed >> 32) & _WORD
        per_head = _mixed(_mixed(sample * self.heads + head + seed[0]) + seed[1])  # [batch, heads]
        per_row = _mixed((per_head[..., None] + rows * _ODD) & _WORD)  # [batch, heads, rows]
        number = _mixed((per_row[..., None] + keys * _ODD) & _WORD)
        kept = number >= int(self.probability * (_WORD + 1))
        return kept / (1 - self.probability) if self.probability < 1 else torch.zeros_like(kept, dtype=torch.float32)


#: Numbers of 32 bits, computed in 64: all devices have the same product.
_WORD = 0xFFFFFFFF
_ODD = 0x9E3779B1


def _mixed(number: torch.Tensor) -> torch.Tensor:
    """Return a number of 32 bits that depends on each bit of ``number`` (the last step of MurmurHash3)."""
    number = number & _WORD
    number = (number ^ (number >> 16)) * 0x85EBCA6B & _WORD
    number = (number ^ (number >> 13)) * 0xC2B2AE35 & _WORD
    return number ^ (number >> 16)


@dataclass(frozen=True)
class BlockScoring:
    """How scores become weights.

    Args:
        scale: of the product of a query and a key.
        mask: ``[batch or 1, heads or 1, rows or 1, keys]``, booleans or numbers to add; None for none.
        bounds: the range of keys that each row attends to; None for all.
        dropout: None for none.
        softcap: scores are capped to it by ``softcap · tanh(score / softcap)``, before the mask; None for not.
        is_exact: whether scores are computed as one process does; see :class:`.Visibility`.
    """

    queries: HeldPositions
    keys: HeldPositions
    member: int
    scale: float
    bounds: KeyBounds | None
    mask: torch.Tensor | None = None
    dropout: PositionalDropout | None = None
    softcap: float | None = None
    is_exact: bool = False

    def of_mask(self, call: AttentionCall) -> torch.Tensor | None:
        """Return a view or copy of the mask for a call, without what positions hide."""
        if self.mask is None or call.kind is not CallKind.MASKED:
            return None
        tile = self.mask[:, :, call.rows] if self.mask.shape[2] > 1 else self.mask
        if isinstance(call.columns, slice):
            return tile[..., call.columns]
        return tile.index_select(-1, call.columns.on(tile.device))

    def visible(self, block: KeyBlock, call: AttentionCall, device: torch.device) -> torch.Tensor | None:
        """Return which keys positions do not hide from which rows, ``[rows, keys]``; None if that is all."""
        if self.bounds is None or call.kind is CallKind.FULL:
            return None
        rows = self.queries.rows[self.member].on(device)[call.rows]
        keys = block.positions.on(device)[call.keys]
        return self.bounds.visible(rows, keys)

    def tile(self, block: KeyBlock, call: AttentionCall, device: torch.device) -> torch.Tensor | None:
        """Return booleans, or numbers to add, of four dims; None for a call whose kind says all."""
        if call.kind is not CallKind.MASKED:
            return None
        own = self.of_mask(call)
        visible = self.visible(block, call, device)
        if own is None:
            return None if visible is None else visible[None, None]
        if visible is None:
            return own
        return own & visible if own.dtype is torch.bool else own.masked_fill(~visible, -torch.inf)

    def factors(
        self, block: KeyBlock, call: AttentionCall, shape: torch.Size, device: torch.device
    ) -> torch.Tensor | None:
        """Return by what each weight is multiplied: dropout; None for none.

        Args:
            shape: ``[batch, heads, rows, …]`` of the queries.
        """
        if self.dropout is None:
            return None
        rows = self.queries.rows[self.member].on(device)[call.rows]
        keys = block.positions.on(device)[call.keys]
        return self.dropout.factors(shape[0], shape[1], rows, keys)
