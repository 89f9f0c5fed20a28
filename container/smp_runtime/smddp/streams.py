"""The all-gather in phases on CUDA: two collectives, one after the other on a stream of their own."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from smp_runtime.smddp.work import StreamWork
from smp_runtime.tensors.torch_private import all_gather_single, all_gather_single_coalesced, timeout_of

if TYPE_CHECKING:
    from smp_config.smddp import BufferSizes
    from smp_runtime.smddp.items import GatherItem
    from smp_runtime.smddp.layout import HostGrid


class StreamGather:
    """An all-gather in phases, made of collectives over two smaller groups.

    The ranks with one number on their hosts gather each other's shards from scratch buffers into sort buffers,
    host by host. Then the ranks of each host gather their sort buffers, one gather for every host. Each of
    these gathers writes one host's shards in the order of its ranks to where they belong, so that nothing is
    left to sort.

    Args:
        across: the ranks with this one's number on their hosts, host by host.
        plain: the backend of the whole group; these groups have its timeout, which may change.
    """

    def __init__(
        self,
        across: dist.ProcessGroup,
        inside: dist.ProcessGroup,
        grid: HostGrid,
        sizes: BufferSizes,
        plain: Any = None,
    ) -> None:
        self._across = across
        self._inside = inside
        self._grid = grid
        self._sizes = sizes
        self._buffers: tuple[torch.Tensor, torch.Tensor] | None = None
        self._stream: torch.cuda.Stream | None = None
        self._plain = plain
        self._timeout = None if plain is None else timeout_of(plain)

    def start(self, items: Sequence[GatherItem], *, here: bool = False) -> StreamWork:
        """Begin all-gathers; all ranks of the group begin their all-gathers in the same order.

        Args:
            here: of no use on a stream.

        Returns:
            The work. Waiting for it lets the caller's stream wait. Its future has the value that NCCL reports.
        """
        device, reported = items[0].shard.device, [tensor for item in items for tensor in item.report()]
        self._follow_timeout()
        if self._buffers is None:
            sizes = (self._sizes.scratch, self._sizes.sort)
            scratch, sort = (torch.empty(size, dtype=torch.uint8, device=device) for size in sizes)
            self._buffers = scratch, sort
        if device.type != "cuda":
            future: torch.futures.Future[Any] = torch.futures.Future()
            self._enqueue(items, *self._buffers)
            future.set_result(reported)
            return StreamWork(future)
        if self._stream is None:
            self._stream = torch.cuda.Stream(device)
        future = torch.futures.Future(devices=[device])
        # The stream runs its work in order, so the next all-gather uses the buffers only after this one is done.
        self._stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(self._stream):
            self._enqueue(items, *self._buffers)
            for item in items:
                for tensor in (item.shard, *item.outputs, *item.filled):
                    tensor.record_stream(self._stream)
            # Completed at once: a waiter waits for the stream's work so far.
            future.set_result(reported)
            event = torch.cuda.Event()
            event.record(self._stream)
        return StreamWork(future, event)

    def _enqueue(self, items: Sequence[GatherItem], scratch: torch.Tensor, sort: torch.Tensor) -> None:
        hosts = self._grid.hosts
        for item in items:
            size = item.shard.numel()
            sent, arrived = scratch[:size], sort[: hosts * size].view(hosts, size)
            sent.copy_(item.shard)
            _wait(all_gather_single(self._across, arrived.view(-1), sent))
            blocks = [_block([item.outputs[rank] for rank in row]) for row in self._grid.rows]
            if all(block is not None for block in blocks):
                _wait(all_gather_single_coalesced(self._inside, blocks, list(arrived)))
            else:
                self._share_in_places(item, arrived, sort[hosts * size :])
            if item.finish is not None:
                item.finish()

    def _share_in_places(self, item: GatherItem, arrived: torch.Tensor, free: torch.Tensor) -> None:
        """Run the phase inside a host through the free part of the sort buffer.

        Used if the shards of a host are not next to each other in memory, as with pieces of shards.
        """
        for row, part in zip(self._grid.rows, arrived, strict=True):
            places = [item.outputs[rank] for rank in row]
            if (needed := len(places) * part.numel()) > free.numel():
                _wait(self._inside.allgather([places], [part]))
                continue
            _wait(all_gather_single(self._inside, free[:needed], part))
            for place, came in zip(places, free[:needed].view(len(places), -1), strict=True):
                place.copy_(came)

    def abort(self) -> None:
        """End the collectives under way on the two groups."""
        for group in (self._across, self._inside):
            group.abort()

    def set_timeout(self, timeout: timedelta) -> None:
        """Set the timeout of later collectives of the two groups."""
        self._timeout = timeout
        for group in (self._across, self._inside):
            group.set_timeout(timeout)

    def _follow_timeout(self) -> None:
        # PyTorch's own function changes only that of the backend it finds.
        if self._plain is not None and timeout_of(self._plain) != self._timeout:
            self.set_timeout(timeout_of(self._plain))

    def close(self) -> None:
        """Shut the two groups down."""
        for group in (self._across, self._inside):
            with contextlib.suppress(AttributeError):
                group.shutdown()


def _wait(work: Any) -> None:
    if work is not None:
        work.wait()


def _block(rows: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """Return the rows as one tensor if they are next to each other in memory, else None."""
    first, size = rows[0], rows[0].numel()
    storage = first.untyped_storage().data_ptr()
    for number, row in enumerate(rows):
        if row.data_ptr() != first.data_ptr() + number * size or row.untyped_storage().data_ptr() != storage:
            return None
    return first.as_strided((len(rows) * size,), (1,))
