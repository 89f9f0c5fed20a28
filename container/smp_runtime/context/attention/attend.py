"""The entry point: scaled dot product attention of this rank's rows over all ranks' keys."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist

    from smp_runtime.comm.collectives import Collectives

METHODS = ("auto", "ring", "all_gather", "all_to_all")


class AttentionGroup(Protocol):
    """The ranks that share out a sequence."""

    rank: int
    size: int

    @property
    def process_group(self) -> dist.ProcessGroup:
        """Return their process group."""

    @property
    def collectives(self) -> Collectives:
        """Return the collectives to use."""


def attend(  # noqa: PLR0913 - the arguments of scaled_dot_product_attention, and the places of the rows
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    query_index: Sequence[torch.Tensor],
    key_index: Sequence[torch.Tensor],
    group: AttentionGroup,
    mask: torch.Tensor | None = None,
    causal: bool = False,
    scale: float | None = None,
    dropout: float = 0.0,
    dropout_seed: int | None = None,
    method: str = "auto",
    grouped: bool = False,
) -> torch.Tensor:
    """Return this rank's rows of ``scaled_dot_product_attention`` over the whole sequence; every rank of the group calls it.

    Args:
        q, k, v: ``[batch, heads, rows of this rank, width]``; one dtype.
        query_index, key_index: for each rank of the group the positions of its rows, int64 on the CPU. Together they are
            ``range(length)``, each once.
        mask: True where a query attends to a key, or what is added to the scores; broadcastable to ``[batch, heads, rows of
            this rank, keys of all ranks in order of position]``.
        causal: a query attends to keys at positions up to its own only.
        dropout: probability.
        dropout_seed: required with dropout; the same on all ranks. Elements drop by seed and position, whatever the degree.
        method: one of :data:`METHODS`.
        grouped: several query heads share a key head (``enable_gqa``).
    """
    raise NotImplementedError
