"""What scripts read off sharded parameters."""

from __future__ import annotations

from collections.abc import Sequence

from smp_runtime.sharding.sharded_unit import ShardedUnit


def mark_parameters(units: Sequence[ShardedUnit]) -> None:
    """Set ``ds_shape``, ``ds_numel`` and ``ds_tensor`` (this rank's part, flat) on every sharded parameter."""
    for unit in units:
        for index, parameter in enumerate(unit.parameters):
            fragment = unit.fragment(index)
            part = unit.shard[:0] if fragment is None else unit.slice_of(unit.shard, fragment).view(-1)
            parameter.ds_shape = unit.shapes[index]  # type: ignore[attr-defined]
            parameter.ds_numel = unit.shapes[index].numel()  # type: ignore[attr-defined]
            parameter.ds_tensor = part  # type: ignore[attr-defined]
