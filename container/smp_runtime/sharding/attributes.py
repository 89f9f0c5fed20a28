"""What scripts read off sharded parameters and off their optimizer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from smp_config import Group
from smp_runtime.sharding.units import ShardedUnit

if TYPE_CHECKING:
    from smp_runtime.pieces import Piece
    from smp_runtime.session import Session


def mark_parameters(units: Sequence[ShardedUnit]) -> None:
    """Set ``ds_shape``, ``ds_numel`` and ``ds_tensor`` (this rank's part, flat) on every sharded parameter."""
    for unit in units:
        for index, parameter in enumerate(unit.parameters):
            fragment = unit.fragment(index)
            part = unit.shard[:0] if fragment is None else unit.slice_of(unit.shard, fragment).view(-1)
            parameter.ds_shape = unit.shapes[index]  # type: ignore[attr-defined]
            parameter.ds_numel = unit.shapes[index].numel()  # type: ignore[attr-defined]
            parameter.ds_tensor = part  # type: ignore[attr-defined]


class ShardingAttributes:
    """Attributes of an optimizer under sharded data parallelism; without it they do not exist."""

    _session: Session
    _model: Any
    _originals: list[list[nn.Parameter]]
    _pieces: list[Piece]

    @property
    def fp16_groups(self) -> list[list[nn.Parameter]]:
        """The model's trained parameters, by parameter group."""
        self._require_shards("fp16_groups")
        return [list(parameters) for parameters in self._originals]

    @property
    def fp32_partitioned_groups_flat(self) -> list[torch.Tensor]:
        """By parameter group, a flat copy of what this rank updates of it, in float32."""
        self._require_shards("fp32_partitioned_groups_flat")
        pieces = {piece.parameter: piece.optimized.detach() for piece in self._pieces}
        parts = [[pieces[p].reshape(-1).float() for p in group if p in pieces] for group in self._originals]
        return [torch.cat(found) if found else torch.empty(0, device=self._session.device) for found in parts]

    @property
    def ds_param_shard_group(self) -> torch.distributed.ProcessGroup:
        """The ranks that share one copy of the parameters."""
        self._require_shards("ds_param_shard_group")
        return self._session.groups.group(Group.SHARD)

    def _require_shards(self, name: str) -> None:
        if self._model is None or self._model.shards is None:
            raise AttributeError(f"{name} exists under sharded data parallelism only")
