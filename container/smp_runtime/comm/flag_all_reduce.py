"""Flags that ranks tell one another at the end of a window: by their hosts, so that none of them waits for its GPU.

What a GPU sums up its host knows only when all work before that is done, and meanwhile queues nothing. Hosts reach one
another beside it, over gloo. That goes round all ranks one after the other, so among many the GPU's way is the shorter one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist

    from smp_runtime.comm.collectives import Collectives, Work

#: Most ranks whose hosts tell one another; of gloo's 2 (n - 1) messages one after the other each takes some 50 µs.
MOST_HOSTS = 32


def travel_by_host(device: torch.device, ranks: int) -> bool:
    """Whether the flags of ranks that compute on such devices go from host to host, though their tensors do not."""
    return device.type != "cpu" and ranks <= MOST_HOSTS


def to_device(values: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A tensor of the host's on a device; the host does not wait until it is there."""
    return values if device.type == "cpu" else values.pin_memory().to(device, non_blocking=True)


class FlagAllReduce:
    """Flags under way, summed over a group.

    Args:
        values: of this rank, in the host's memory.
        device: where it computes.
        ranks: of the group.
    """

    def __init__(
        self, values: torch.Tensor, device: torch.device, collectives: Collectives, group: dist.ProcessGroup, ranks: int
    ) -> None:
        self._values = values if travel_by_host(device, ranks) else to_device(values, device)
        self._work: Work = collectives.all_reduce(self._values, group)

    def finish(self) -> torch.Tensor:
        """Wait; returns the sums, in the host's memory."""
        self._work.wait()
        return self._values.cpu()
