"""The parameter registry: every parameter's global name, shape and aliases, read by all that walk over the state."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from smp_config import Group
from smp_runtime.errors import SMPUserError

if TYPE_CHECKING:
    from torch import nn


@dataclass(frozen=True)
class ParameterPlacement:
    """The location of a parameter's elements.

    Attributes:
        tensor_axis: dimension that tensor parallelism splits, or None.
        tensor_slice: start and stop of this rank's part along it, or None; of several runs one after the other.
        tensor_longest: longest part along it that a rank has.
        shard: start and stop of the elements with state that this rank owns, counted in the flattened parameter; None
            if every replica owns all of it. Equal numbers mean that this rank owns nothing.
    """

    stage: int = 0
    tensor_axis: int | None = None
    tensor_slice: tuple[int, ...] | None = None
    tensor_longest: int = 0
    shard: tuple[int, int] | None = None


@dataclass(frozen=True)
class MatrixOrigin:
    """The place of a parameter in a matrix of the module that tensor parallelism has replaced.

    Attributes:
        name: of the replaced module's parameter; empty if it is unknown what the parameter was.
        shape: of that matrix, as the replaced module has it.
        transposed: whether rows of the parameter are columns of that matrix.
        start: of the parameter, row and column, in that matrix or, if ``transposed``, in its transpose.
    """

    name: str
    shape: tuple[int, int]
    transposed: bool = False
    start: tuple[int, int] = (0, 0)


UNKNOWN_ORIGIN = MatrixOrigin("", (0, 0))


@dataclass
class ParameterRecord:
    """One parameter (not one name: tied names share a record).

    Attributes:
        name: its first global name, as in the unwrapped module.
        shape: global shape.
        placement: where its elements are.
        reduction: the group over which its gradient is averaged: all ranks of a stage, or, for parameters that see the
            batch of a whole tensor parallel group, those with the same tensor coordinate.
        origin: if it replaces one of other shape, or a part of one.
        model: a number that the records of one model share on this rank; on other ranks it may be another.
    """

    name: str
    shape: tuple[int, ...]
    aliases: tuple[str, ...]
    parameter: nn.Parameter
    placement: ParameterPlacement = ParameterPlacement()
    reduction: Group = Group.DP
    origin: MatrixOrigin | None = None
    model: int = 0

    @property
    def names(self) -> tuple[str, ...]:
        """Return all global names, the first one first."""
        return (self.name, *self.aliases)


class ParameterRegistry:
    """All parameters of a module, each once."""

    _numbers = itertools.count()

    def __init__(self, module: nn.Module) -> None:
        number = next(self._numbers)
        names: dict[int, list[str]] = {}
        parameters: dict[int, nn.Parameter] = {}
        for name, parameter in module.named_parameters(remove_duplicate=False):
            names.setdefault(id(parameter), []).append(name)
            parameters[id(parameter)] = parameter
        self._records = [
            ParameterRecord(found[0], tuple(parameters[key].shape), tuple(found[1:]), parameters[key], model=number)
            for key, found in names.items()
        ]
        self._by_parameter = {id(record.parameter): record for record in self._records}

    def __iter__(self) -> Iterator[ParameterRecord]:
        return iter(self._records)

    def __len__(self) -> int:
        return len(self._records)

    def record_of(self, parameter: torch.Tensor) -> ParameterRecord:
        """Return the record of a parameter of this model.

        Raises:
            SMPUserError: If it is not one.
        """
        record = self._by_parameter.get(id(parameter))
        if record is None:
            raise SMPUserError(
                f"a tensor of shape {list(parameter.shape)} is not a parameter of the wrapped model; create the "
                "optimizer from the parameters of the model that smp.DistributedModel wraps",
                code="SMP303",
            )
        return record

    def place_stages(self, stage_of: Callable[[str], int]) -> None:
        """Note which pipeline stage holds each parameter; ``stage_of`` takes a module's path."""
        for record in self._records:
            record.placement = replace(record.placement, stage=stage_of(record.name.rpartition(".")[0]))

    def place_shards(self, shards: Mapping[nn.Parameter, tuple[int, int]]) -> None:
        """Record the elements with state that this rank owns, for parameters with sharded state."""
        for parameter, shard in shards.items():
            record = self.record_of(parameter)
            record.placement = replace(record.placement, shard=shard)

    def reduced_over(self, group: Group) -> Iterator[ParameterRecord]:
        """Return the records of the parameters with gradients that are averaged over this kind of group."""
        return (record for record in self._records if record.reduction is group)

    @property
    def elements(self) -> int:
        """Return the number of elements of all parameters, tied ones counted once."""
        return sum(record.parameter.numel() for record in self._records)


class Successors:
    """Parameters of replaced modules, and those that are trained in their place; kept once per job."""

    def __init__(self) -> None:
        self._made: WeakTensorKeyDictionary = WeakTensorKeyDictionary()

    def note(self, replaced: nn.Parameter, made: Sequence[nn.Parameter]) -> None:
        """Record that a parameter was replaced; ``made`` is empty if its successors are unknown."""
        self._made[replaced] = tuple(weakref.ref(parameter) for parameter in made)

    def note_freed(self, replaced: nn.Parameter, stand_in: nn.Parameter) -> None:
        """Record that the replaced module has ``stand_in`` now, since optimizers may be built from it too."""
        if (made := self._made.get(replaced, None)) is not None:
            self._made[stand_in] = made

    def made_of(self, replaced: nn.Parameter) -> list[nn.Parameter]:
        """Return the parameters with the elements of a replaced one; empty if it is not replaced or they are unknown."""
        references = self._made.get(replaced, None) or ()
        found = [reference() for reference in references]
        return [parameter for parameter in found if parameter is not None]

    def follow(self, parameters: Sequence[nn.Parameter]) -> list[nn.Parameter]:
        """Return ``parameters`` with successors in place of replaced ones.

        Raises:
            SMPUserError: If a replaced one has none.
        """
        found: dict[nn.Parameter, None] = {}
        for parameter in parameters:
            references = self._made.get(parameter, None)
            if references is None:
                found[parameter] = None
                continue
            made = self.made_of(parameter)
            if not made:
                raise SMPUserError(
                    f"the optimizer has a parameter of shape {list(parameter.shape)} of a module that tensor parallelism has "
                    "replaced, with new weights, so that it would train nothing; create the optimizer from model.parameters() of "
                    "the model that smp.DistributedModel returned",
                    code="SMP303",
                )
            found.update(dict.fromkeys(made))
        return list(found)


@dataclass(frozen=True)
class TensorSlice:
    """A rank's part of a whole tensor.

    Attributes:
        shape: of the whole.
        dim: dimension along which it is split.
        bounds: start and stop of this rank's part; if several pieces are divided, such as queries and keys in one
            tensor, of its part of each, one after the other.
        size: longest part along ``dim`` that a rank has.
    """

    shape: tuple[int, ...]
    dim: int
    bounds: tuple[int, ...]
    size: int

    @classmethod
    def of(cls, shape: tuple[int, ...], dim: int, rank: int, ranks: int, pieces: Sequence[int] = ()) -> TensorSlice:
        """Return a rank's slice of equal size; the last ones are shorter if the number of ranks does not divide.

        Args:
            pieces: lengths of the parts that are divided separately; the number of ranks divides each.
        """
        length = shape[dim]
        if len(pieces) > 1:
            bounds: list[int] = []
            start = 0
            for piece in pieces:
                part = piece // ranks
                first = start + rank * part
                bounds += [first, first + part]
                start += piece
            return cls(shape, dim, tuple(bounds), sum(pieces) // ranks)
        size = -(-length // ranks)
        first, last = rank * size, (rank + 1) * size
        return cls(shape, dim, (min(first, length), min(last, length)), size)

    @classmethod
    def owned(cls, shape: tuple[int, ...], dim: int, rank: int, owner: int) -> TensorSlice:
        """Return the slice of a tensor that lies whole on rank ``owner``; it is empty on the other ranks."""
        return cls(shape, dim, (0, shape[dim] if rank == owner else 0), shape[dim])

    @property
    def start(self) -> int:
        """Return the first index of this rank's part."""
        return self.bounds[0]

    @property
    def stop(self) -> int:
        """Return the index after the last of this rank's part."""
        return self.bounds[-1]

    @property
    def lengths(self) -> list[int]:
        """Return the lengths of this rank's part of each piece."""
        return [stop - start for start, stop in intervals(self.bounds)]

    @property
    def local_shape(self) -> tuple[int, ...]:
        """Return the shape of this rank's part."""
        return (*self.shape[: self.dim], sum(self.lengths), *self.shape[self.dim + 1 :])

    def cut(self, whole: torch.Tensor) -> torch.Tensor:
        """Return this rank's part of a whole tensor; a view if it is one run."""
        return cut(whole, self.dim, self.bounds)


def intervals(bounds: Sequence[int]) -> list[tuple[int, int]]:
    """Return the pairs of start and stop."""
    return list(zip(bounds[::2], bounds[1::2], strict=True))


def cut(whole: torch.Tensor, dim: int, bounds: Sequence[int]) -> torch.Tensor:
    """Join runs along a dim; the result is a view if there is only one run."""
    runs = [whole.narrow(dim, start, stop - start) for start, stop in intervals(bounds)]
    return runs[0] if len(runs) == 1 else torch.cat(runs, dim)


def part_of(record: ParameterRecord, value: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of a value that may be whole."""
    axis, bounds = record.placement.tensor_axis, record.placement.tensor_slice
    if axis is None or bounds is None or value.shape == record.parameter.shape or tuple(value.shape) != record.shape:
        return value
    return cut(value, axis, bounds)
