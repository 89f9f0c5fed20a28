"""Float32 weights of sharded data parallelism in flat buffers, as other tools read them."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from smp_config import Group
from smp_runtime.checkpoint.files.manifest import Piece
from smp_runtime.checkpoint.live_state import Updated, local_records

if TYPE_CHECKING:
    from smp_runtime.checkpoint.files.tensor_regions import TensorRegion
    from smp_runtime.job.session import Session
    from smp_runtime.model.distributed_model import DistributedModel
    from smp_runtime.sharding.sharded_parameters import ShardedParameters

#: Makes of a live tensor the one that is written, which may get its elements when all files are built. The name is unique in the
#: rank's files.
Keep = Callable[[str, torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class Apart:
    """What another thread writes a checkpoint with.

    Attributes:
        keep: copies a tensor before training goes on.
        group: the ranks of the sharding group, in a process group that nothing else uses; None without sharding.
    """

    keep: Keep
    group: torch.distributed.ProcessGroup | None


def piece_of(region: TensorRegion) -> Piece:
    """Return a region as a manifest records it."""
    return Piece(
        None if region.axis is None else region.cuts,
        None if region.is_slice else (region.first, region.last),
    )


@dataclass
class FlatGroups:
    """Float32 weights of sharded data parallelism as other tools read them: by parameter group, one flat buffer.

    Each parameter is divided evenly among the ranks of a sharding group, the last parts filled up with zeros, and a
    rank's parts follow each other in the order of the group. (In memory, units of several parameters are divided.)

    Attributes:
        buffers: of this rank, one for each parameter group, once they are filled; None without sharded data parallelism or
            optimizer.
        pieces: where this rank's part of each parameter is.
        names: the parameters that are in the buffers of any rank.
        shapes: of the parameters of each group, by name, in order.
    """

    buffers: list[torch.Tensor] | None = None
    pieces: dict[str, Piece] = field(default_factory=dict)
    names: set[str] = field(default_factory=set)
    shapes: list[dict[str, list[int]]] = field(default_factory=list)


#: Index of a buffer, a part's offset in it, and the part's first and last element in the flat parameter.
_Place = tuple[int, int, int, int]


def flat_groups(
    session: Session, model: DistributedModel, entries: Sequence[Updated], leads_tensors: bool, apart: Apart | None
) -> tuple[FlatGroups, Callable[[], None]]:
    """Give every rank of the sharding group its even part of every parameter.

    Args:
        leads_tensors: whether this rank writes what tensor parallelism does not split.
        apart: None if they are filled at once.

    Returns:
        The groups, and what fills their buffers, which all ranks of the sharding group call together.
    """
    shards = model.shards
    if shards is None:
        raise AssertionError("flat groups belong to sharded data parallelism")
    degree, position = session.ranks.size(Group.SHARD), session.ranks.rank_in(Group.SHARD)
    local = {record.parameter for record in local_records(model)}
    made = FlatGroups(buffers=[])
    places: dict[torch.nn.Parameter, _Place] = {}
    lengths: list[int] = []
    for entry in entries:
        while len(made.shapes) <= entry.group:
            made.shapes.append({})
            lengths.append(0)
        is_written = leads_tensors or entry.record.placement.tensor_axis is not None
        if not is_written or entry.parameter not in shards.optimizer_shards or entry.parameter not in local:
            continue
        elements = entry.region.slice_elements
        share_elements = -(-elements // degree)
        first, last = min(position * share_elements, elements), min((position + 1) * share_elements, elements)
        places[entry.parameter] = (entry.group, lengths[entry.group], first, last)
        made.names.add(entry.name)
        made.shapes[entry.group][entry.name] = list(entry.region.slice_shape)
        if first < last:
            tensor = piece_of(entry.region).tensor
            made.pieces[entry.name] = Piece(tensor, (first, last), (entry.group, lengths[entry.group]))
        lengths[entry.group] += share_elements
    held = {p: shard.optimized.detach() for p, shard in shards.optimizer_shards.items() if shard is not None}
    if apart is not None:
        names = {entry.parameter: entry.name for entry in entries}
        held = {p: apart.keep(f"part/{names[p]}", value) for p, value in held.items() if p in names}
    # The same on every rank, also on one that has no part of anything.
    types = {torch.float32 if model.precision.is_half else p.dtype for p in shards.optimizer_shards}
    dtype = functools.reduce(torch.promote_types, types, torch.float32)
    buffers: list[torch.Tensor] = []
    made.buffers = buffers

    def fill() -> None:
        # Never on the device, which may not have enough memory for them.
        buffers.extend(torch.zeros(length, dtype=dtype, device="cpu") for length in lengths)
        _fill(buffers, places, held, shards, apart.group if apart is not None else None)

    return made, fill


@torch.no_grad()
def _fill(
    buffers: list[torch.Tensor],
    places: dict[torch.nn.Parameter, _Place],
    held: dict[torch.nn.Parameter, torch.Tensor],
    shards: ShardedParameters,
    group: torch.distributed.ProcessGroup | None,
) -> None:
    """Put this rank's part of every whole parameter into its place."""
    parts = {p: value for p, value in held.items() if p in shards.parameters}
    others = ((p, value) for p, value in held.items() if p not in shards.parameters)
    for parameter, whole in itertools.chain(shards.whole_values(parts, group), others):
        if parameter in places:
            index, offset, first, last = places[parameter]
            buffers[index][offset : offset + last - first].copy_(whole.reshape(-1)[first:last])
