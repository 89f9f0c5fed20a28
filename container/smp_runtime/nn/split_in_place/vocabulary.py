"""Embeddings and heads of models that are split in place: rows of the vocabulary on each rank, and one weight if they are tied."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import torch.nn.functional as F
from torch import nn

from smp_config import Group
from smp_runtime.nn.distributed_module import DistributedModule, NotDistributableError, ReadByOthers
from smp_runtime.nn.embedding import rows_of_all
from smp_runtime.nn.split_in_place.linear import has_own_weight
from smp_runtime.nn.split_in_place.tables import inherit_attributes
from smp_runtime.parameters.registry import TensorSlice
from smp_runtime.tensor_parallel.collectives import exchange_parts, gather_slices, use_replicated
from smp_runtime.tensor_parallel.initialisation import normal_fill, uniform_for
from smp_runtime.tensor_parallel.masks import agree_on_shape

if TYPE_CHECKING:
    import torch

    from smp_runtime.tensor_parallel.initialisation import Fill


class Tie:
    """Modules that share one weight, of the original and of what takes their places."""

    def __init__(self) -> None:
        self._made: nn.Parameter | None = None

    def give_weight(self, module: DistributedModule, rows: int, width: int, fill: Fill) -> None:
        """Give a module the weight ``[rows, width]``, split by rows; the first module makes it, the others share it.

        Raises:
            NotDistributableError: there are too few rows.
        """
        where = TensorSlice.of((rows, width), 0, module.tensor_group.rank, module.tensor_group.size)
        if rows <= where.size * (module.tensor_group.size - 1):
            raise NotDistributableError(
                f"it has {rows} rows, too few for {module.tensor_group.size} ranks to have a part each; use a smaller "
                "tensor_parallel_degree"
            )
        # One parameter object: the ties of the original are ties of what takes its place.
        if self._made is None:
            module.add_split("weight", (rows, width), 0, fill)
            self._made = module._parameters["weight"]
        else:
            module.register_parameter("weight", self._made)
            module.tensor_slices["weight"], module.reductions["weight"] = where, Group.RDP


class _WithoutWeight(nn.Embedding):
    """It is made without a weight, by those that have another."""

    def __init__(self) -> None:
        nn.Module.__init__(self)


class PlannedEmbedding(ReadByOthers, _WithoutWeight):
    """An ``nn.Embedding`` with some rows of the vocabulary on each rank.

    A subclass of ``nn.Embedding`` keeps its ``forward``, which this class's stands behind: see :func:`embedding_like`.

    Args:
        original: that it stands for.
        tie: with others of the same weight.
    """

    weight: nn.Parameter

    def __init__(self, original: nn.Embedding, tie: Tie) -> None:
        DistributedModule.__init__(self)
        _refuse_settings(original)
        inherit_attributes(original, self)
        tie.give_weight(self, original.num_embeddings, original.embedding_dim, normal_fill(1.0))

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Return the rows of the ids ``[batch, …]``, as ``[batch, …, embedding_dim]``."""
        group, where = self.tensor_group, self.tensor_slices["weight"]
        if group.size == 1:
            return F.embedding(input, self._own_part("weight"), self.padding_idx)
        if not group.prescaled:
            agree_on_shape(group, input)
        return rows_of_all(input, self._own_part("weight"), range(where.start, where.stop), self.padding_idx, group)


class PlannedHead(ReadByOthers):
    """A linear map to the vocabulary, with some of its outputs on each rank, which gets all of them.

    Args:
        original: that it stands for; its bias, ``[vocabulary]``, stays where it is.
        tie: with others of the same weight.
    """

    weight: nn.Parameter
    bias: nn.Parameter | None

    def __init__(self, original: nn.Linear, tie: Tie) -> None:
        super().__init__()
        self.in_features, self.out_features = original.in_features, original.out_features
        tie.give_weight(self, self.out_features, self.in_features, uniform_for(self.in_features))
        self.register_parameter("bias", original.bias)
        self.reductions["bias"] = Group.DP  # it is added to this rank's own rows, and others may have it too

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Map ``[batch, …, in]`` to ``[batch, …, vocabulary]``."""
        group = self.tensor_group
        if group.size == 1:
            return F.linear(input, self._own_part("weight"), self.bias)
        # Collectives need parts of one size, but the last rank may have fewer rows.
        missing = self.tensor_slices["weight"].size - self._own_part("weight").shape[0]
        if group.prescaled:
            mine = F.linear(use_replicated(input, group), self._own_part("weight"))
            logits = gather_slices(F.pad(mine, (0, missing)), group, -1, partial=False)
        else:
            agree_on_shape(group, input)
            rows = gather_slices(input, group, 0, partial=True)
            logits = exchange_parts(
                F.pad(F.linear(rows, self._own_part("weight")), (0, missing)), group, split=0, joined=-1
            )
        logits = logits.narrow(-1, 0, self.out_features)
        return logits if self.bias is None else logits + self.bias

    def extra_repr(self) -> str:
        """Return the sizes over all ranks, as PyTorch prints them."""
        return f"{self.in_features}, {self.out_features}, bias={self.bias is not None}"


@functools.cache
def embedding_like(kind: type[nn.Embedding]) -> Any:
    """Return :class:`PlannedEmbedding`, or a class with the ``forward`` of a subclass of ``nn.Embedding`` before it."""
    if kind is nn.Embedding:
        return PlannedEmbedding
    # In the order of its bases ours comes behind the script's class and before PyTorch's, so that super() finds it.
    return type(kind.__name__, (kind, PlannedEmbedding), {"__init__": PlannedEmbedding.__init__})


def _refuse_settings(original: nn.Embedding) -> None:
    needs_all_rows = original.max_norm is not None or original.sparse or original.scale_grad_by_freq
    if needs_all_rows:
        raise NotDistributableError(
            f"it has max_norm={original.max_norm}, sparse={original.sparse} and scale_grad_by_freq={original.scale_grad_by_freq}, "
            "for which a rank would need the rows of all ranks; leave them at None and False"
        )


def is_vocabulary(module: nn.Module) -> bool:
    """Return whether a module may be an embedding or head that can be split by rows.

    The caller must check the module's uses, too.
    """
    if not has_own_weight(module):
        return False
    kind = type(module)
    if kind in (nn.Linear, nn.Embedding):
        return True
    forward = getattr(type(module).forward, "__code__", None)
    if not isinstance(module, nn.Embedding) or forward is None:
        return False
    return "__class__" in forward.co_freevars and "weight" not in forward.co_names
