"""Gathers of weights in 8 bits: half of the bytes of bfloat16, for layers that multiply in 8 bits anyway."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

import torch

from smp_runtime.fp8.autocast import running_layers
from smp_runtime.fp8.scales import WEIGHT, LinearScales, from_eight_bits, to_eight_bits

if TYPE_CHECKING:
    from torch import nn

    from smp_runtime.comm.collectives import Work


def find_scales(module: nn.Module) -> dict[int, LinearScales]:
    """Return the scales of a model's layers that multiply in 8 bits in all passes, by the ``id`` of their weights."""
    layers = running_layers()
    return {} if layers is None else layers.scales_in(module)


class ShardGathering(Protocol):
    """Brings the shards of a buffer together, see ``sharding/all_gather.py``."""

    def start(self, full: torch.Tensor, shard: torch.Tensor) -> Work:
        """Begin to fill ``full`` from every rank's ``shard``."""
        ...


class ShardedWeights(Protocol):
    """Weights of layers in one flat buffer that is sharded over the ranks; see ``sharding/flat_unit.py``."""

    shard: torch.Tensor
    shards: int
    shard_elements: int
    dtype: torch.dtype
    device: torch.device
    fragments: list[Any]

    def views_of(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """Return views of the weights' shapes in a buffer of this layout."""
        ...

    def part_of(self, flat: torch.Tensor) -> torch.Tensor:
        """Return this rank's part of such a buffer."""
        ...


class EightBitGather:
    """Brings the weights of a unit together as the layers would round them.

    A layer rounds its weight with the same scale again, which changes nothing. So results are those of a gather of exact weights.

    Args:
        scales: of each parameter of the unit.
    """

    def __init__(self, unit: ShardedWeights, scales: Sequence[LinearScales]) -> None:
        self._unit = unit
        self._scales = list(scales)

    def may_round(self) -> bool:
        """Return whether all layers have multiplied in 8 bits before, on any rank; the same on all ranks."""
        rounds = all(scales.is_known for scales in self._scales)
        for scales in self._scales:
            scales.weight_comes_rounded = rounds
        return rounds

    @torch.no_grad()
    def start(self, gathering: ShardGathering, full: torch.Tensor) -> Work:
        """Begin to fill ``full``; the parts of other ranks are rounded, this rank's own is exact."""
        unit = self._unit
        sent = torch.zeros(unit.shard_elements, dtype=torch.uint8, device=unit.device)
        used = [scales.scale_on(unit.device)[WEIGHT] for scales in self._scales]
        for scales, scale, fragment in zip(self._scales, used, unit.fragments, strict=True):
            if fragment is None:
                continue
            where = slice(fragment.offset, fragment.offset + fragment.stop - fragment.start)
            scales.note(WEIGHT, unit.shard[where])
            sent[where] = to_eight_bits(unit.shard[where], scale, scales.kind_of(WEIGHT)).view(torch.uint8)
        received = torch.empty(unit.shards * unit.shard_elements, dtype=torch.uint8, device=unit.device)
        return _Arriving(self, gathering.start(received, sent), received, sent, full, used)

    @torch.no_grad()
    def fill(self, full: torch.Tensor, received: torch.Tensor, used: Sequence[torch.Tensor]) -> None:
        """Write what has arrived into the whole."""
        unit = self._unit
        parts = zip(self._scales, used, unit.views_of(received), unit.views_of(full), strict=True)
        for scales, scale, came, view in parts:
            view.copy_(from_eight_bits(came.view(scales.kind_of(WEIGHT)), scale, unit.dtype))
        unit.part_of(full).copy_(unit.shard)  # a write of the script changes this rank's part, which must stay exact


class _Arriving:
    """A gather under way; its tensors live until it is over."""

    def __init__(
        self,
        gather: EightBitGather,
        work: Work,
        received: torch.Tensor,
        sent: torch.Tensor,
        full: torch.Tensor,
        used: Sequence[torch.Tensor],
    ) -> None:
        self._gather, self._work, self._full, self._used = gather, work, full, used
        self._received: torch.Tensor | None = received
        self._sent: torch.Tensor | None = sent

    def wait(self) -> None:
        if self._received is None:
            return
        self._work.wait()
        self._gather.fill(self._full, self._received, self._used)
        self._received = self._sent = None
