"""Embeddings over several ranks: split along the embedding's channels, or along the vocabulary."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import nn

from smp_runtime.job import session as sessions
from smp_runtime.nn.distributed_module import DistributedModule, NotDistributableError, ReadByOthers
from smp_runtime.tensor_parallel.collectives import (
    agreeing_on_shape,
    exchange_parts,
    gather_slices,
    scatter_summed,
    sum_partials,
    whole_batch,
)

if TYPE_CHECKING:
    from smp_config import Group
    from smp_runtime.tensor_parallel.group import TensorGroup
    from smp_runtime.tensor_parallel.initialisation import Fill


class DistributedEmbedding(ReadByOthers):
    """``nn.Embedding`` with a weight of ``[num_embeddings, embedding_dim / tp]`` on each rank.

    Args:
        num_embeddings: rows.
        embedding_dim: channels, over all ranks.
        padding_idx: a row that stays zero and gets no gradient.
        max_norm: must be None: a row's norm is spread over the ranks.
        norm_type: of ``max_norm``; it has no effect without that, as in ``nn.Embedding``, and logs a warning.
        scale_grad_by_freq: as in ``nn.Embedding``.
        sparse: must be False.
        initializer_range: standard deviation of the weights.
        _weight: the whole weight, in place of random numbers.
        _skip_allgather: return this rank's channels only.
        _skip_scatter_and_merge: with a batch per rank, return the rows of all batches.

    Raises:
        IndivisibleError: (a ``ValueError``) the ranks do not divide ``embedding_dim``.
        NotDistributableError: ``max_norm`` or ``sparse``.

    Example:
        >>> embedding = smp.nn.DistributedEmbedding(100, 64)
        >>> embedding(torch.tensor([[1, 2, 3]])).shape
        torch.Size([1, 3, 64])
    """

    weight: nn.Parameter

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        padding_idx: int | None = None,
        max_norm: float | None = None,
        norm_type: float = 2.0,
        scale_grad_by_freq: bool = False,
        sparse: bool = False,
        _weight: torch.Tensor | None = None,
        initializer_range: float = 0.02,
        _skip_allgather: bool = False,
        _skip_scatter_and_merge: bool = False,
    ) -> None:
        super().__init__()
        if max_norm is not None or sparse:
            raise NotDistributableError(
                f"DistributedEmbedding got max_norm={max_norm} and sparse={sparse}; a row is spread over the ranks, so "
                "neither is possible: leave them at None and False"
            )
        if norm_type != 2.0:
            sessions.say_once(
                f"DistributedEmbedding(norm_type={norm_type}) ignored: it is the norm of max_norm, which is None: leave it out"
            )
        self.num_embeddings, self.embedding_dim, self.padding_idx = num_embeddings, embedding_dim, padding_idx
        self.scale_grad_by_freq = scale_grad_by_freq
        self._skip_allgather, self._skip_scatter_and_merge = _skip_allgather, _skip_scatter_and_merge
        self.share_of("embedding_dim", embedding_dim)
        self.add_split("weight", (num_embeddings, embedding_dim), 1, _rows(initializer_range, padding_idx))
        if _weight is not None:
            with torch.no_grad():
                self.weight.copy_(self.tensor_slices["weight"].cut(_weight))

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Return the rows of the ids ``[batch, …]``, as ``[batch, …, embedding_dim]``."""
        group = self.tensor_group
        own = group.size > 1 and not group.prescaled
        # Each rank has columns of all rows, so it needs the ids of all ranks.
        ids = whole_batch(agreeing_on_shape(input, group), group) if own else input
        mine = F.embedding(ids, self._own_part("weight"), self.padding_idx, scale_grad_by_freq=self.scale_grad_by_freq)
        stays_local = group.size == 1 or self._skip_allgather
        if stays_local:
            return mine
        # Each rank keeps the rows of its own batch, and gets all columns of them.
        if own and not self._skip_scatter_and_merge:
            return exchange_parts(mine, group, split=0, joined=-1)
        return gather_slices(mine, group, -1, partial=False)

    def extra_repr(self) -> str:
        """Return the sizes over all ranks, as PyTorch prints them."""
        return f"{self.num_embeddings}, {self.embedding_dim}"


def rows_of_all(
    input: torch.Tensor, weight: torch.Tensor, here: range, padding: int | None, group: TensorGroup
) -> torch.Tensor:
    """Look up ids in an embedding that is split by rows, and sum the ranks' results.

    Ids with rows on other ranks are zeros in a rank's own result.

    Args:
        input: ids ``[batch, …]``; with a batch per rank, this rank's.
        weight: ``[rows, hidden]`` of this rank.
        here: the ids that they are for.
        padding: an id that gets no gradient for its row.

    Returns:
        ``[batch, …, hidden]``.
    """
    ids = input if group.prescaled else whole_batch(input, group)
    elsewhere = (ids < here.start) | (ids >= here.stop)
    local = padding - here.start if padding is not None and padding in here else None
    # Row 0 is looked up in place of rows elsewhere; the mask behind it stops its gradient too.
    rows = F.embedding((ids - here.start).masked_fill(elsewhere, 0), weight, local)
    rows = rows.masked_fill(elsewhere.unsqueeze(-1), 0.0)
    return sum_partials(rows, group) if group.prescaled else scatter_summed(rows, group, 0)


class VocabularyEmbedding(DistributedModule):
    """An embedding with some rows of the vocabulary on each rank; its weight can serve as a language model's head.

    The last rank has fewer rows if the number of ranks does not divide the vocabulary.

    Args:
        vocab_size: rows, over all ranks.
        padding_idx: a row that stays zero and gets no gradient from the embedding.

    Attributes:
        start: first id of this rank.
        stop: behind its last.
    """

    weight: nn.Parameter

    def __init__(self, vocab_size: int, hidden_size: int, std: float, padding_idx: int | None = None) -> None:
        super().__init__()
        self.vocab_size, self.padding_idx = vocab_size, padding_idx
        self.add_split("weight", (vocab_size, hidden_size), 0, _rows(std, padding_idx))
        self.start = self.tensor_slices["weight"].start
        self.stop = self.tensor_slices["weight"].stop
        if vocab_size <= self.tensor_slices["weight"].size * (self.tensor_group.size - 1):
            raise NotDistributableError(
                f"vocab_size is {vocab_size}, too few for {self.tensor_group.size} ranks to have a part each; use a smaller "
                "tensor_parallel_degree"
            )

    def become_whole(self, alone: TensorGroup) -> None:
        """See :class:`DistributedModule`."""
        super().become_whole(alone)
        self.start, self.stop = 0, self.vocab_size

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Return the rows of the ids ``[batch, seq]``, as ``[batch, seq, hidden]``."""
        group = self.tensor_group
        if group.size == 1:
            return F.embedding(input, self.weight, self.padding_idx)
        return rows_of_all(input, self.weight, range(self.start, self.stop), self.padding_idx, group)


class WholeEmbedding(DistributedModule):
    """An embedding that every rank has whole; part of a distributed model, so its weight is drawn with the others.

    Args:
        reduction: over which group the gradient is averaged.
        padding_idx: a row that stays zero and gets no gradient from the embedding.
    """

    weight: nn.Parameter

    def __init__(
        self, num_embeddings: int, embedding_dim: int, std: float, reduction: Group, padding_idx: int | None = None
    ) -> None:
        super().__init__()
        self.padding_idx = padding_idx
        self.add_whole("weight", (num_embeddings, embedding_dim), _rows(std, padding_idx), reduction)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Return the rows of the ids ``[batch, seq]``, as ``[batch, seq, embedding_dim]``."""
        return F.embedding(input, self.weight, self.padding_idx)


def _rows(std: float, padding: int | None) -> Fill:
    def fill(whole: torch.Tensor, generator: torch.Generator) -> None:
        whole.normal_(0.0, std, generator=generator)
        if padding is not None:
            whole[padding].zero_()

    return fill
