"""The ranks whose greatest values count for each other's scales."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

import torch
import torch.distributed as dist

from smp_config.machine.collective_backends import HOST_BACKEND

if TYPE_CHECKING:
    from smp_runtime.comm.collectives import Collectives


class AmaxGroup(Protocol):
    """Ranks whose greatest values count for each other's scales.

    Attributes:
        size: their number.
    """

    size: int

    def greatest(self, values: torch.Tensor) -> torch.Tensor:
        """Return the greatest of all ranks' values, element by element."""
        ...

    def have_same(self, number: int) -> bool:
        """Return whether all ranks have the same number."""
        ...

    def all_of(self, names: list[str]) -> list[list[str]]:
        """Return the names of all ranks."""
        ...


class ScriptGroup:
    """A process group that a script names; None stands for all ranks, or this one if there are no others."""

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self._group = group
        self.size = dist.get_world_size(group) if dist.is_available() and dist.is_initialized() else 1

    def _device(self) -> torch.device:
        on_gpus = dist.get_backend(self._group) not in (HOST_BACKEND, "mpi") and torch.cuda.is_available()
        return torch.device("cuda", torch.cuda.current_device()) if on_gpus else torch.device("cpu")

    def greatest(self, values: torch.Tensor) -> torch.Tensor:
        """See :class:`AmaxGroup`."""
        found = values.to(self._device(), copy=True)
        dist.all_reduce(found, op=dist.ReduceOp.MAX, group=self._group)
        return found

    def have_same(self, number: int) -> bool:
        """See :class:`AmaxGroup`."""
        found = torch.tensor([number, -number], device=self._device())
        dist.all_reduce(found, op=dist.ReduceOp.MAX, group=self._group)
        greatest, least = found.tolist()
        return bool(greatest == -least)

    def all_of(self, names: list[str]) -> list[list[str]]:
        """See :class:`AmaxGroup`."""
        found: list[Any] = [None] * self.size
        dist.all_gather_object(found, names, group=self._group)
        return found


class JobGroup:
    """All ranks of a job, which have the same layers.

    Args:
        collectives: returns those of the job, which a change of degrees replaces.
        group: returns the group of all ranks.
    """

    def __init__(
        self,
        collectives: Callable[[], Collectives],
        group: Callable[[], dist.ProcessGroup],
        size: int,
        device: torch.device,
    ) -> None:
        self._collectives, self._group, self._device = collectives, group, device
        self.size = size

    def greatest(self, values: torch.Tensor) -> torch.Tensor:
        """See :class:`AmaxGroup`."""
        mine = values.reshape(-1).to(self._device)
        found = torch.empty(self.size * mine.numel(), dtype=mine.dtype, device=self._device)
        self._collectives().all_gather(found, mine, self._group()).wait()
        return found.view(self.size, -1).amax(0).view(values.shape)

    def have_same(self, number: int) -> bool:
        """Return True: every rank lays out the same model."""
        return True

    def all_of(self, names: list[str]) -> list[list[str]]:
        """Return this rank's names, which are those of all ranks."""
        return [names]
