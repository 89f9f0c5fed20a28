"""All-reduce of flags at the end of a window, between hosts, so that no host waits for its GPU.

A host sees the result of a GPU's all-reduce only after all earlier GPU work, and queues nothing meanwhile. Hosts can
exchange flags over gloo at the same time. gloo passes them through all ranks one after the other, so the GPU's
all-reduce is faster with many ranks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist

    from smp_runtime.comm.collectives import Collectives, Work

#: Most ranks that exchange flags between hosts: gloo sends 2 (n - 1) messages one after the other, some 50 µs each.
MOST_HOSTS = 32


def travel_by_host(device: torch.device, ranks: int) -> bool:
    """Return whether ranks on such devices exchange flags between hosts, though not their tensors."""
    return device.type != "cpu" and ranks <= MOST_HOSTS


def to_device(values: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Copy a host tensor to a device without blocking the host, and return the copy."""
    return values if device.type == "cpu" else values.pin_memory().to(device, non_blocking=True)


class FlagAllReduce:
    """Flags under way, summed over a group.

    Args:
        values: of this rank, in the host's memory.
        device: the device that this rank computes on.
        ranks: of the group.
    """

    def __init__(
        self, values: torch.Tensor, device: torch.device, collectives: Collectives, group: dist.ProcessGroup, ranks: int
    ) -> None:
        self._values = values if travel_by_host(device, ranks) else to_device(values, device)
        self._work: Work = collectives.all_reduce(self._values, group)

    def finish(self) -> torch.Tensor:
        """Wait for the sums, and return them in the host's memory."""
        self._work.wait()
        return self._values.cpu()
