"""Whole matrices put together from the parts of several ranks, and their updates handed back, a few at a time."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import torch

from smp_config import Group
from smp_runtime.comm.flag_all_reduce import FlagAllReduce
from smp_runtime.optim.matrices.joins import joins_and_rates, name_in
from smp_runtime.optim.matrices.other_ranks import infer_holdings
from smp_runtime.optim.matrices.ownership import MatrixHolding, Part, SharedMatrix, in_rounds, is_complete, share_out
from smp_runtime.optim.matrices.regions import Join, Region, regions_of

if TYPE_CHECKING:
    from torch import nn

    from smp_runtime.job.ranks import Ranks
    from smp_runtime.job.trained import TrainedModel
    from smp_runtime.optim.whole_state import Records
    from smp_runtime.parameters.registry import ParameterRecord

#: A parameter group.
Settings = dict[str, Any]


@dataclass(eq=False)
class Matrices:
    """A parameter with one or more matrices, and what this rank updates of it.

    Attributes:
        name: the same on all ranks.
        settings: the parameter's group.
        updated: the tensor that this rank's optimizer updates; None if it has no elements.
        shape: of the whole parameter.
        regions: the elements of each matrix in ``updated``.
        is_split: whether tensor parallelism cuts it.
        join: if it is a part of a matrix that has other parameters too.
        rated: shape of each matrix in the module that tensor parallelism has replaced, for which its rate is; None if it is that
            of the parameter.
        record: None for a parameter of no wrapped model.
    """

    name: str
    settings: Settings
    updated: nn.Parameter | None
    shape: tuple[int, ...]
    regions: Sequence[Region]
    is_split: bool = False
    join: Join | None = None
    rated: tuple[int, int] | None = None
    record: ParameterRecord | None = None

    def part_of(self, tensor: torch.Tensor, region: Region) -> torch.Tensor:
        """Return a region's elements of a tensor shaped like ``updated``, as a view: a matrix if it is whole."""
        if region.is_whole and tensor.dim() == len(self.shape):
            if tensor.dim() == 2:
                return tensor
            return tensor[region.offset // (region.shape[0] * region.shape[1])]
        part = tensor.view(-1)[region.offset : region.offset + region.elements]
        return part.view(region.shape) if region.is_whole else part


class MatrixUpdate(Protocol):
    """What an optimizer does with matrices, in three parts."""

    def wire_dtype(self, matrices: Matrices) -> torch.dtype:
        """Return the type in which whole matrices are computed with, and sent."""
        ...

    def direction(self, matrices: Matrices, region: Region) -> torch.Tensor:
        """Return the direction of a region's elements, after the gradient has entered their momentum."""
        ...

    def transform(self, matrices: Matrices, whole: torch.Tensor) -> torch.Tensor:
        """Return the update of a whole matrix from its direction."""
        ...

    def apply(self, matrices: Matrices, region: Region, update: torch.Tensor) -> None:
        """Move a region's elements by their part of the update."""
        ...


def update_here(update: MatrixUpdate, matrices: Matrices) -> None:
    """Update the matrices that this rank has whole."""
    for region in matrices.regions:
        if region.is_whole:
            direction = update.direction(matrices, region)
            update.apply(matrices, region, update.transform(matrices, direction))


@runtime_checkable
class TakesMatrices(Protocol):
    """An optimizer that is right about parts of matrices once it can have the whole ones."""

    def use_matrices(self, matrices: WholeMatrices | None) -> None:
        """Use ``matrices`` from now on, since parameters may be parts and other ranks have the rest."""


def is_pytorch_muon(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether an optimizer is PyTorch's Muon, and not a subclass with an update of its own."""
    kind = getattr(torch.optim, "Muon", None)  # since PyTorch 2.9
    return kind is not None and isinstance(optimizer, kind) and type(optimizer).step is kind.step


def takes_matrices(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether an optimizer updates whole matrices, and gets them where ranks have parts."""
    return isinstance(optimizer, TakesMatrices) or is_pytorch_muon(optimizer)


class WholeMatrices:
    """An optimizer's matrices, with parts on several ranks.

    Ranks of a tensor parallel group have parts of the matrices that it splits. Ranks that share optimizer state have runs of
    elements. All ranks of a stage call :meth:`update` together. For each matrix, one of the ranks with the most elements receives
    the directions of the others, in the type that it computes with, and sends back their parts of the update. So the elements
    that it lacks are sent twice, which is the least with one rank that computes the update.

    Args:
        model: the model with the optimizer shards to update; None if the parameters themselves are updated.
        records: names and places of the model's parameters.
        groups: the optimizer's parameters as the script has given them, by group.
    """

    def __init__(
        self,
        ranks: Ranks,
        model: TrainedModel | None,
        records: Callable[[], Records],
        groups: Callable[[], list[list[nn.Parameter]]],
    ) -> None:
        self._ranks = ranks
        self._model = model
        self._records = records
        self._groups = groups
        #: What was logged already; None where another rank logs.
        self._said: set[str] | None = set() if ranks.rank_in(Group.DP) == 0 else None
        #: The matrices of several ranks or parameters, and their parts, for the parameters that they were planned for.
        self._planned: tuple[tuple[Any, ...], list[list[SharedMatrix]]] | None = None

    def of(self, groups: Sequence[Settings], is_taken: Callable[[Settings], bool]) -> list[Matrices]:
        """Return the parameters of groups that are updated as matrices, the same on all ranks; of some a rank has no elements.

        Args:
            groups: the optimizer's.
            is_taken: whether a group has matrices.
        """
        shards = (self._model.optimizer_shards or {}) if self._model is not None else {}
        records = self._records()
        found: list[Matrices] = []
        models: dict[int, int] = {}  # numbered in the order of the groups, which all ranks have
        for settings, originals in zip(groups, self._groups(), strict=True):
            if not is_taken(settings):
                continue
            known = [records[each] for each in originals if each in records]
            for each in known:
                models.setdefault(each.model, len(models))
            joins, rated = joins_and_rates(known, models, self._said)
            for parameter in originals:
                record, shard = records.get(parameter), shards.get(parameter)
                if record is None:
                    found.append(_unknown(settings, parameter, len(found)))
                    continue
                place, name = record.placement, name_in(record.name, models[record.model])
                is_split, join = place.tensor_axis is not None, joins.get(parameter)
                here = Matrices(name, settings, None, record.shape, (), is_split, join, rated.get(parameter), record)
                if parameter not in shards or shard is not None:  # else it is another rank's
                    start, stop = (0, math.prod(record.shape)) if shard is None else (shard.start, shard.stop)
                    regions = regions_of(record.shape, place.tensor_axis, place.tensor_slice, start, stop, join)
                    here = replace(here, updated=parameter if shard is None else shard.optimized, regions=regions)
                found.append(here)
        return found

    @torch.no_grad()
    def update(self, update: MatrixUpdate, matrices: Sequence[Matrices]) -> None:
        """Update matrices, those that this rank has whole and those that it has parts of.

        Args:
            matrices: all that :meth:`of` has returned, whether they have a gradient or not.
        """
        by_name = {each.name: each for each in matrices}
        rounds = self._rounds(update, matrices)
        used = self._used(rounds, by_name)
        for each in matrices:
            if _has_gradient(each):
                update_here(update, each)
        for shared in rounds:
            self._update_joined(update, shared, by_name)
            self._round(update, [each for each in shared if each.parameters in used], by_name)

    def _update_joined(
        self, update: MatrixUpdate, shared: Sequence[SharedMatrix], by_name: Mapping[str, Matrices]
    ) -> None:
        """Update the matrices of several parameters that this rank has whole."""
        for each in shared:
            is_mine = each.is_on_one_rank and each.owner == self._ranks.rank
            if is_mine and any(_has_gradient(by_name[name]) for name in each.parameters):
                self._answer(update, each, by_name, ())

    def _rounds(self, update: MatrixUpdate, matrices: Sequence[Matrices]) -> list[list[SharedMatrix]]:
        """Return the matrices of several ranks, by round; a first call, and one after a change, talks to the other ranks."""
        planned_for = tuple((each.name, tuple(each.regions)) for each in matrices)
        if self._planned is not None and self._planned[0] == planned_for:
            return self._planned[1]
        ranks = self._ranks
        state = self._model.sharded_state if self._model is not None else None
        mine = self._holding(update, matrices)
        members = ranks.members(Group.DP)
        everyone = ranks.control.allgather(mine, members) if len(members) > 1 else [mine]
        holdings = dict(zip(members, everyone, strict=True))
        if not is_complete(holdings):  # in a rehearsal, where one rank stands for all
            known = {each.name: each.record for each in matrices if each.record is not None}
            joins = {each.name: each.join for each in matrices}
            holdings = infer_holdings(ranks, mine, known, joins, state)
        rounds = in_rounds(share_out(holdings))
        self._planned = planned_for, rounds
        return rounds

    def _holding(self, update: MatrixUpdate, matrices: Sequence[Matrices]) -> MatrixHolding:
        """Return what this rank has of the matrices, for the other ranks."""
        ranks = self._ranks
        state = self._model.sharded_state if self._model is not None else None
        present = [each for each in matrices if each.regions]
        return MatrixHolding(
            sharers=(ranks.rank,) if state is None else tuple(ranks.members(state.sharing)),
            tensor=tuple(ranks.members(Group.TP)),
            regions={each.name: tuple(each.regions) for each in present},
            joined={each.name: each.join.name for each in matrices if each.join is not None},
            split=frozenset(each.name for each in matrices if each.is_split),
            widths={each.name: update.wire_dtype(each).itemsize for each in present},
        )

    def _used(self, rounds: Sequence[Sequence[SharedMatrix]], by_name: Mapping[str, Matrices]) -> set[tuple[str, ...]]:
        """Return the parameters of matrices of several ranks, of those for which any rank has a gradient."""
        several: set[tuple[str, ...]] = set()
        for each in rounds:
            several.update(shared.parameters for shared in each if not shared.is_on_one_rank)
        if not several:
            return set()
        # Sorted, so that a flag means the same matrix on every rank.
        asked = sorted(several)
        flags = torch.zeros(len(asked), dtype=torch.int64, device="cpu")
        for at, names in enumerate(asked):
            here = [by_name[name] for name in names if name in by_name]
            flags[at] = int(any(map(_has_gradient, here)))
        ranks = self._ranks
        group, size = ranks.groups.group(Group.DP), ranks.size(Group.DP)
        sums = FlagAllReduce(flags, ranks.device, ranks.collectives, group, size).finish()
        return {names for names, count in zip(asked, sums.tolist(), strict=True) if count}

    def _round(self, update: MatrixUpdate, shared: Sequence[SharedMatrix], by_name: Mapping[str, Matrices]) -> None:
        """Exchange directions and updates of some matrices; all ranks of the stage call this."""
        if not shared:
            return
        me, members = self._ranks.rank, self._ranks.members(Group.DP)
        # Both ends of a message go through the same list.
        leaving = _Mail(
            members,
            [(each.owner, each, (me, name)) for each in shared if me != each.owner for name in each.of_rank(me)],
        )
        arriving = _Mail(
            members,
            [(part[0], each, part) for each in shared if me == each.owner for part in each.parts if part[0] != me],
        )
        mine = leaving.buffer(self._ranks.device)
        for each, (_, name), part in leaving.parts(mine):
            matrices = by_name[name]
            here = part.view(update.wire_dtype(matrices))
            here.copy_(update.direction(matrices, each.parts[me, name]).view(-1))
        theirs = arriving.buffer(self._ranks.device)
        self._exchange(theirs, mine, arriving.sizes, leaving.sizes)
        for each in shared:
            if each.owner == me:
                self._answer(update, each, by_name, arriving.parts_of(each, theirs))
        # Answers are as long as what they answer, and lie where it lay.
        self._exchange(mine, theirs, leaving.sizes, arriving.sizes)
        for each, (_, name), part in leaving.parts(mine):
            matrices = by_name[name]
            update.apply(matrices, each.parts[me, name], part.view(update.wire_dtype(matrices)))

    def _answer(
        self,
        update: MatrixUpdate,
        shared: SharedMatrix,
        by_name: Mapping[str, Matrices],
        parts: Sequence[tuple[Region, torch.Tensor]],
    ) -> None:
        """Update a matrix; write the others' parts of the update in the place of their directions."""
        mine = [(by_name[name], region) for name, region in shared.of_rank(self._ranks.rank).items()]
        first, region = mine[0]
        dtype = update.wire_dtype(first)
        whole = torch.empty(region.shape, dtype=dtype, device=self._ranks.device)
        for matrices, region in mine:
            region.put(whole, update.direction(matrices, region).to(dtype).reshape(-1))
        for region, part in parts:
            region.put(whole, part.view(dtype))
        whole = update.transform(first, whole)
        for region, part in parts:
            region.take(whole, part.view(dtype))
        for matrices, region in mine:
            own = torch.empty(region.elements, dtype=dtype, device=whole.device)
            region.take(whole, own)
            update.apply(matrices, region, own)

    def _exchange(
        self, received: torch.Tensor, sent: torch.Tensor, arriving: Sequence[int], leaving: Sequence[int]
    ) -> None:
        group = self._ranks.groups.group(Group.DP)
        self._ranks.collectives.all_to_all(received, sent, group, (arriving, leaving)).wait()


class _Mail:
    """Parts of matrices that go to the members of a group, or come from them, in one buffer.

    Args:
        members: in the order of the group.
        parts: a member, a matrix, and the part of it that is sent or comes.

    Attributes:
        sizes: bytes by member.
    """

    def __init__(self, members: Sequence[int], parts: Sequence[tuple[int, SharedMatrix, Part]]) -> None:
        self.sizes: list[int] = []
        self._places: list[tuple[SharedMatrix, Part, Region, int]] = []
        at = 0
        for member in members:
            begin = at
            for peer, shared, holder in parts:
                if peer == member:
                    self._places.append((shared, holder, shared.parts[holder], at))
                    at += _aligned(shared.parts[holder].elements * shared.width)
            self.sizes.append(at - begin)
        self._bytes = at

    def buffer(self, device: torch.device) -> torch.Tensor:
        """Return memory for all parts."""
        return torch.empty(self._bytes, dtype=torch.uint8, device=device)

    def parts(self, buffer: torch.Tensor) -> Iterator[tuple[SharedMatrix, Part, torch.Tensor]]:
        """Yield the matrix of each part, the part, and its bytes in a buffer."""
        for shared, part, region, at in self._places:
            yield shared, part, buffer[at : at + region.elements * shared.width]

    def parts_of(self, wanted: SharedMatrix, buffer: torch.Tensor) -> list[tuple[Region, torch.Tensor]]:
        """Return the parts of one matrix, each with its bytes in a buffer."""
        return [
            (region, buffer[at : at + region.elements * shared.width])
            for shared, _, region, at in self._places
            if shared is wanted
        ]


def _has_gradient(matrices: Matrices) -> bool:
    """Return whether this rank has elements of a parameter, and a gradient of them."""
    return matrices.updated is not None and matrices.updated.grad is not None


def _aligned(size: int) -> int:
    """Return a number of bytes behind which elements of any type may begin."""
    return -(-size // 8) * 8


def _unknown(settings: Settings, parameter: nn.Parameter, number: int) -> Matrices:
    """Return a parameter that belongs to no wrapped model, so that this rank has all of it."""
    shape = tuple(parameter.shape)
    return Matrices(f"#{number}", settings, parameter, shape, regions_of(shape, None, None, 0, parameter.numel()))


def whole_here(groups: Sequence[Settings], is_taken: Callable[[Settings], bool]) -> list[Matrices]:
    """Return the parameters of an optimizer that has all of their elements, of the groups that have matrices."""
    found: list[Matrices] = []
    for group in groups:
        if not is_taken(group):
            continue
        for parameter in group["params"]:
            found.append(_unknown(group, parameter, len(found)))
    return found
