"""Messages between pipeline stages: their shapes travel, their elements do not."""

from __future__ import annotations

import threading
from collections.abc import Callable

import torch

from smp_records.rehearsal import LinkCount
from smp_runtime.pipeline.transport.tensor_channels import Announcement, Reader, TensorChannel, bytes_of
from smp_tools.rehearsal.skip_compute_mode import PERFORMED_BYTES


class LinkCounter:
    """Counts what goes to each other stage, by step.

    Attributes:
        step: the step that runs; -1 before the first.
    """

    def __init__(self) -> None:
        self.reaches(lambda rank: 0, lambda rank: True)
        # Stages send on several threads.
        self._lock = threading.Lock()
        self._rows: dict[tuple[int, int, bool], tuple[int, int]] = {}
        self.step = -1

    def reaches(self, kind_of: Callable[[int], int], same_host: Callable[[int], bool]) -> None:
        """Set the functions that locate ranks.

        Args:
            kind_of: the pipeline stage of a global rank.
            same_host: whether a global rank is on this rank's host.
        """
        self._kind_of = kind_of
        self._same_host = same_host

    def channel(self, peer: int) -> TensorChannel:
        """Return the channel to or from a rank."""
        return _ShapeChannel(self, peer)

    def add(self, peer: int, nbytes: int) -> None:
        """Count a tensor that is sent to a rank."""
        key = (self.step, self._kind_of(peer), self._same_host(peer))
        with self._lock:
            messages, total = self._rows.get(key, (0, 0))
            self._rows[key] = messages + 1, total + nbytes

    def counts(self) -> list[LinkCount]:
        """Return all counts, ordered by step."""
        with self._lock:
            rows = sorted(self._rows.items())
        return [
            LinkCount(step=step, stage=stage, same_host=same_host, messages=messages, tensor_bytes=total)
            for (step, stage, same_host), (messages, total) in rows
        ]


class _ShapeChannel(TensorChannel):
    """See :class:`~smp_runtime.pipeline.transport.tensor_channels.TensorChannel`; only small tensors travel with their values."""

    def __init__(self, links: LinkCounter, peer: int) -> None:
        self._links = links
        self._peer = peer

    def inline(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """See :class:`TensorChannel`."""
        if tensor.nbytes > PERFORMED_BYTES:
            return None
        self._links.add(self._peer, tensor.nbytes)
        return tensor

    def post(self, tensor: torch.Tensor) -> None:
        """See :class:`TensorChannel`."""
        self._links.add(self._peer, tensor.nbytes)

    def receive(self, announced: Announcement, read: Reader) -> torch.Tensor:
        """See :class:`TensorChannel`."""
        tensor = announced.allocate(torch.device("cpu"))
        if 0 < (size := announced.nbytes) <= PERFORMED_BYTES:
            read(bytes_of(tensor, size, writable=True))
        return tensor

    def flush(self, deadline: float) -> None:
        """Return at once: no tensor is in transfer."""

    def prune(self) -> None:
        """Do nothing: no tensor is kept."""
