"""Linear maps of modules that are split in place: the originals' names and layout, a part on each rank."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F

from smp_runtime.fp8.current import find_call
from smp_runtime.nn.distributed_module import ReadByOthers
from smp_runtime.parameters.registry import TensorSlice, cut
from smp_runtime.tensor_parallel import collectives
from smp_runtime.tensor_parallel.initialisation import uniform_for
from smp_runtime.tensor_parallel.split_functions import multiply_rows

if TYPE_CHECKING:
    from torch import nn

    from smp_config import Group
    from smp_runtime.fp8.current import Multiply
    from smp_runtime.tensor_parallel.block_entry import SharedInput
    from smp_runtime.tensor_parallel.group import TensorGroup


@dataclass(frozen=True)
class LinearSplit:
    """The way in which a linear map is split.

    Attributes:
        columns: its outputs are split, else its inputs.
        joins: the other side is whole all the same: outputs are gathered, or inputs sliced.
        transposed: its weight is ``[in, out]``, as in GPT-2, not ``[out, in]``.
        pieces: lengths of outputs that are split separately, such as queries, keys and values; empty for one piece.
        runs: for each rank the starts and stops of its outputs, if several ranks need the same: keys of heads that
            the ranks do not divide. Every rank has the weight whole then.
        local: without collectives, in a module that sums its results.
        owner: a rank that has all of it, if the others have nothing and make zeros; ``pieces`` has the number of
            outputs.
    """

    columns: bool
    joins: bool = False
    transposed: bool = False
    pieces: tuple[int, ...] = ()
    runs: tuple[tuple[int, ...], ...] = ()
    local: bool = False
    owner: int | None = None

    @property
    def dim(self) -> int:
        """Return the dim of the weight along which each rank has a part."""
        return int(self.columns == self.transposed)

    @property
    def dims(self) -> dict[str, int]:
        """Return the dim along which each rank has a part, for each parameter that is not whole."""
        if self.runs:
            return {}
        return {"weight": self.dim, "bias": 0} if self.columns else {"weight": self.dim}

    def apply(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        group: TensorGroup,
        shared: SharedInput,
        multiply: Multiply | None = None,
    ) -> torch.Tensor:
        """Map replicated rows ``[…, in]`` to ``[…, out]``; unless joined, one side has only this rank's features.

        Args:
            multiply: in place of ``F.linear``; None for that.
        """
        matrix = weight.t() if self.transposed else weight
        product = F.linear if multiply is None else multiply
        if group.size > 1 and (self.local or self.owner is not None):
            return self._alone(x, matrix, bias, group, product)
        if self.runs and group.size > 1:
            matrix = cut(matrix, 0, self.runs[group.rank])
            bias = None if bias is None else cut(bias, 0, self.runs[group.rank])
        if self.columns:
            features = product(shared.of(x, group), matrix, bias)
            return collectives.gather_slices(features, group, -1, partial=False) if self.joins else features
        # The maps of columns before this one are done with their common input.
        shared.clear()
        mine = collectives.take_slice(x, group, -1) if self.joins else x
        return multiply_rows(mine, group, None, matrix, bias, multiply)

    def slice(self, shape: tuple[int, ...], dim: int, rank: int, size: int) -> TensorSlice:
        """Return a rank's slice of a weight or bias."""
        if self.owner is not None:
            return TensorSlice.owned(shape, dim, rank, self.owner)
        return TensorSlice.of(shape, dim, rank, size, self.pieces)

    def _alone(
        self, x: torch.Tensor, matrix: torch.Tensor, bias: torch.Tensor | None, group: TensorGroup, product: Multiply
    ) -> torch.Tensor:
        # A summand without effect: the module's own sum goes over all ranks.
        if self.owner is not None and self.owner != group.rank:
            return x.new_zeros((*x.shape[:-1], *self.pieces))
        if self.columns:
            return product(x, matrix, bias)
        # The ranks' results are summed, so each adds a share of the bias.
        share = None if bias is None else bias / group.size
        return product(x, matrix, share)


class PlannedLinear(ReadByOthers):
    """A linear map inside a module that is split in place.

    Args:
        in_features: channels of the input, over all ranks.
        out_features: channels of the output, over all ranks.
        split: how it is shared out.
        bias: whether it has one.
        shared: of the block that it is in.
        reduction: over which group the gradient of what every rank has whole is averaged.

    Raises:
        IndivisibleError: (a ``ValueError``) the ranks do not divide the features that are shared out.
    """

    weight: nn.Parameter
    bias: nn.Parameter | None
    #: Its products may be in 8 bits.
    multiplies_rows = True

    def __init__(
        self, in_features: int, out_features: int, split: LinearSplit, bias: bool, shared: SharedInput, reduction: Group
    ) -> None:
        super().__init__()
        self.in_features, self.out_features = in_features, out_features
        self.split, self.shared = split, shared
        shape = (in_features, out_features) if split.transposed else (out_features, in_features)
        fill = uniform_for(in_features)
        if split.runs:
            self.add_whole("weight", shape, fill, reduction)
            self.add_whole("bias", (out_features,), fill, reduction, exists=bias)
            return
        divided, features = ("out_features", out_features) if split.columns else ("in_features", in_features)
        if split.owner is None:
            for piece in split.pieces or (features,):
                self.share_of(divided, piece)
        self.add_split("weight", shape, split.dim, fill, pieces=split.pieces, owner=split.owner)
        if split.columns:
            self.add_split("bias", (out_features,), 0, fill, pieces=split.pieces, owner=split.owner, exists=bias)
        else:
            self.add_whole("bias", (out_features,), fill, reduction, exists=bias)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Compute features of replicated rows."""
        weight, bias = self._own_part("weight"), self._own_part("bias")
        return self.split.apply(input, weight, bias, self.tensor_group, self.shared, find_call(self))

    def extra_repr(self) -> str:
        """Return the sizes over all ranks, as PyTorch prints them."""
        side = "out_features" if self.split.columns else "in_features"
        return f"{self.in_features}, {self.out_features}, bias={self.bias is not None}, split along {side}"


def is_linear(module: Any) -> bool:
    """Return whether a module is a linear map with a weight of its own.

    It may be PyTorch's, also with a forward of its own, or the one of Transformers ([in, out]).
    """
    is_of_kind = isinstance(module, torch.nn.Linear) or is_transposed(module)
    return is_of_kind and has_own_weight(module)


def has_own_weight(module: torch.nn.Module) -> bool:
    """Return whether a module's weight is a parameter, and not computed from others by a parametrization or pruning.

    The check must not read a computed weight: each read runs one power iteration of a spectral norm.
    """
    return module._parameters.get("weight") is not None


def is_transposed(module: Any) -> bool:
    """Return whether a linear map's weight is ``[in, out]``."""
    kind = type(module)
    return f"{kind.__module__}.{kind.__qualname__}" == "transformers.pytorch_utils.Conv1D"


def features_of(module: Any) -> tuple[int, int]:
    """Return the channels of the input and of the output of a linear map."""
    first, second = module.weight.shape
    return (first, second) if is_transposed(module) else (second, first)
