"""Checks that the parts of a parameter hold its values: after tensor parallelism or sharding has cut it."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch

from smp_config import Group
from smp_runtime.comm.collectives import broadcast_tensors
from smp_runtime.errors import NumericsError
from smp_runtime.module_conversion.parameter_layout import slices_by_name
from smp_runtime.parameters.registry import Successors
from smp_runtime.tensors.parameter_attributes import get_data
from smp_tools.numerics.sketch import bits_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from torch import nn

    from smp_runtime.job.ranks import Ranks
    from smp_runtime.model.local_part import LocalPart, ParallelState
    from smp_runtime.parameters.precision import Precision

#: What sums of bits are counted modulo.
_MODULUS = 2**64


class _Cut(NamedTuple):
    """A parameter and this rank's parts of it."""

    name: str
    parts: Sequence[torch.Tensor]  # none if another rank has it
    expected: int  # sum of the bits of the whole
    elements: int  # of the whole


@torch.no_grad()
def check_tensor_parallel(originals: Mapping[str, nn.Parameter], module: nn.Module, ranks: Ranks) -> None:
    """Check that the parts of a tensor parallel group add up to the parameters that they were cut from.

    The sum of the elements' bits does not change when a tensor is transposed, or its rows are put in another order. Parameters
    without values yet, with new weights, of another type, or joined from several are left out.

    Raises:
        NumericsError: on all ranks of the group.
    """
    successors = ranks.kept(Successors)
    if ranks.size(Group.TP) == 1 or successors is None:
        return
    slices = slices_by_name(module)
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    is_first = ranks.rank_in(Group.TP) == 0
    cuts = []
    for name, original in originals.items():
        made = successors.made_of(original)
        if not made or original.is_meta:
            continue
        is_alike = all(each.dtype is original.dtype and not each.is_meta for each in made)
        if not is_alike:
            continue
        # One that is whole on every rank counts once.
        parts = []
        for each in made:
            is_slice = names.get(id(each)) in slices
            if is_first or is_slice:
                parts.append(get_data(each))
        cuts.append(_Cut(name, parts, _bits([get_data(original)])[0], original.numel()))
    _check(cuts, ranks, Group.TP, "tensor parallel rank", needs_all_elements=False)


class ShardSums:
    """Sums over the parameters of a model before they are cut into shards, and the comparison afterwards."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._part: weakref.ref[LocalPart] | None = None
        self._types: list[torch.dtype] = []
        self._parameters: list[nn.Parameter] = []
        self._sums: torch.Tensor | None = None

    @torch.no_grad()
    def note(self, part: LocalPart, precision: Precision) -> None:
        """Sum the values of all parameters that have some, in each type that a shard may have."""
        ranks = self._ranks
        shares_state = ranks.cfg.shard_optimizer_state and ranks.size(Group.DP) > 1
        shards_parameters = ranks.cfg.sharded_data_parallel_degree > 1
        if not shards_parameters and not shares_state:
            return
        self._part = weakref.ref(part)
        self._parameters = [parameter for parameter in part.parameters() if not parameter.is_meta]
        self._types = [precision.compute, torch.float32] if precision.compute is not None else []
        sums: list[int] = []
        for parameter in self._parameters:
            value = get_data(parameter).to(ranks.device)
            casts = [value]
            for kind in self._types:
                casts.append(value.to(kind) if value.is_floating_point() else value)
            sums += _bits(casts)
        signed = [_signed(number) for number in sums]
        self._sums = torch.tensor(signed, dtype=torch.int64, device=ranks.device)

    @torch.no_grad()
    def check(self, part: LocalPart, placed: ParallelState) -> None:
        """Compare the sums of the shards with those of the values that they were cut from.

        Raises:
            NumericsError: on all ranks that share the first wrong parameter.
        """
        state, sums = placed.sharded_state, self._sums
        if state is None or sums is None:
            return
        noted = self._part() if self._part is not None else None
        if noted is not part:
            return
        expected = self._agreed(part, sums)
        for is_master in (False, True):
            cuts = list(self._cuts(part, placed, expected, is_master=is_master))
            _check(cuts, self._ranks, state.sharing, "rank of the sharing group", needs_all_elements=True)
        self._sums, self._parameters = None, []

    def _agreed(self, part: LocalPart, sums: torch.Tensor) -> list[list[int]]:
        """Return the first replica's sums, which all other replicas use: one for each parameter and type."""
        ranks, rows = self._ranks, len(self._parameters)
        found: dict[Group, list[list[int]]] = {}
        for group in (Group.DP, Group.RDP):
            theirs = sums.clone()
            broadcast_tensors([theirs], ranks.members(group)[0], ranks.groups.group(group), ranks.collectives)
            found[group] = theirs.view(rows, len(self._types) + 1).tolist() if rows else []
        records = [part.registry.record_of(parameter) for parameter in self._parameters]
        return [
            found[Group.DP if record.placement.tensor_axis is None else Group.RDP][row]
            for row, record in enumerate(records)
        ]

    def _cuts(
        self, part: LocalPart, placed: ParallelState, expected: Sequence[Sequence[int]], *, is_master: bool
    ) -> Iterator[_Cut]:
        """Yield the parts of parameters that the model keeps, or those that the optimizer updates."""
        places = placed.shards.places if placed.shards is not None else {}
        state = placed.sharded_state
        shared = state.places if state is not None else {}
        for parameter, sums in zip(self._parameters, expected, strict=True):
            is_never_updated = is_master and not parameter.requires_grad
            if parameter not in shared or is_never_updated:
                continue
            shard = (placed.optimizer_shards or {}).get(parameter)
            if is_master:
                parts = [] if shard is None else [get_data(shard.optimized)]
            elif parameter in places:
                parts = [parameter.ds_tensor]  # type: ignore[attr-defined]
            else:
                continue  # whole on every rank
            name = part.registry.record_of(parameter).name
            expected_bits = sums[self._type_of(parameter, is_master=is_master)] % _MODULUS
            yield _Cut(f"the optimizer's {name}" if is_master else name, parts, expected_bits, parameter.numel())

    def _type_of(self, parameter: nn.Parameter, *, is_master: bool) -> int:
        """Return which of the sums counts for a parameter's parts."""
        if not self._types or parameter.dtype is not self._types[0]:  # it trains in its own type
            return 0
        return 2 if is_master else 1


def _check(cuts: Sequence[_Cut], ranks: Ranks, group: Group, whose: str, *, needs_all_elements: bool) -> None:
    """Add up the parts of a group; all its ranks call it with the same parameters."""
    if not cuts:
        return
    sums = iter(_bits([part for cut in cuts for part in cut.parts]))
    mine = []  # of each cut: the sum of bits, and the elements, of this rank's parts
    for cut in cuts:
        bits = sum(next(sums) for _ in cut.parts)
        mine.append((bits, sum(part.numel() for part in cut.parts)))
    by_rank = ranks.control.allgather(mine, ranks.members(group))
    for row, cut in enumerate(cuts):
        counts = [theirs[row][1] for theirs in by_rank]
        elements = sum(counts)
        is_whole = elements == cut.elements
        if not is_whole and not needs_all_elements:
            continue  # padded, or joined from several
        total = sum(theirs[row][0] for theirs in by_rank) % _MODULUS
        is_unchanged = is_whole and total == cut.expected
        if not is_unchanged:
            shown = ", ".join(f"{count:,}" for count in counts)
            raise NumericsError(
                f"the parts of {cut.name} on ranks {ranks.members(group)} are not what it was cut from: they have {shown} of its "
                f"{cut.elements:,} elements, and the sum of their bits is {total} instead of {cut.expected}. Each {whose} takes "
                "its part when the model is wrapped, so the training would begin with other weights. Possible causes: a hook of "
                "tp_register that reads weights otherwise on some ranks, or a fault of this library. Report it with the model; "
                '"check_invariants": False goes on without this check'
            )


def _bits(tensors: Sequence[torch.Tensor]) -> list[int]:
    """Return the sums of some tensors' bits, modulo 2^64, with one wait for each device."""
    waiting: dict[torch.device, list[int]] = {}
    for index, tensor in enumerate(tensors):
        waiting.setdefault(tensor.device, []).append(index)
    found = [0] * len(tensors)
    for indices in waiting.values():
        sums = torch.cat([bits_of(tensors[index]) for index in indices]).tolist()
        for index, number in zip(indices, sums, strict=True):
            found[index] = number % _MODULUS
    return found


def _signed(number: int) -> int:
    return number - _MODULUS if number >= _MODULUS // 2 else number
