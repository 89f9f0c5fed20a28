"""Collectives of a job with absent ranks: nothing moves, and everything is counted.

Data from other ranks are assumed to equal this rank's data: a sum over a group is this rank's tensor times the number of members.
The sum is computed for small tensors, because agreements of the runtime read such values (flags, orders, norms).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from smp_records.rehearsal import CollectiveCount
from smp_runtime.tensors.torch_private import group_of_operation
from smp_tools.rehearsal.skip_compute_mode import PERFORMED_BYTES, perform_unwatched, tensors_of

if TYPE_CHECKING:
    from smp_runtime.comm.collectives import Collectives, Sizes, Work
    from smp_tools.rehearsal.calls import CallLog
    from smp_tools.rehearsal.memory import RankPhase

#: By collective, bytes that a member of ``n`` sends for each byte of the whole tensor, and messages in a ring.
_SENT: dict[str, tuple[Callable[[int], float], Callable[[int], int]]] = {
    "all_reduce": (lambda n: 2 * (n - 1) / n, lambda n: 2 * (n - 1)),
    "broadcast": (lambda n: (n - 1) / n, lambda n: n - 1),
    "reduce_scatter": (lambda n: (n - 1) / n, lambda n: n - 1),
    "all_gather": (lambda n: (n - 1) / n, lambda n: n - 1),
    "all_to_all": (lambda n: (n - 1) / n, lambda n: n - 1),
    "reduce": (lambda n: (n - 1) / n, lambda n: n - 1),
    "gather": (lambda n: 1 / n, lambda n: 1),
    "scatter": (lambda n: 1 / n, lambda n: 1),
    "send": (lambda n: 1, lambda n: 1),
    "recv": (lambda n: 0, lambda n: 0),
    "barrier": (lambda n: 0, lambda n: 1),
}

#: PyTorch's names of its own operations.
_NAMES = {
    "allreduce": "all_reduce",
    "all_reduce": "all_reduce",
    "allreduce_coalesced": "all_reduce",
    "broadcast": "broadcast",
    "alltoall": "all_to_all",
    "alltoall_base": "all_to_all",
    "all_to_all_single": "all_to_all",
    "allgather": "all_gather",
    "allgather_base": "all_gather",
    "all_gather_into_tensor": "all_gather",
    "reduce_scatter": "reduce_scatter",
    "reduce_scatter_base": "reduce_scatter",
    "reduce_scatter_tensor": "reduce_scatter",
    "reduce": "reduce",
    "gather": "gather",
    "scatter": "scatter",
    "send": "send",
    "recv": "recv",
    "recv_any_source": "recv",
    "barrier": "barrier",
}


class CollectiveLedger:
    """Totals of collectives by step, phase, kind and group.

    Args:
        where: returns the phase of the calling thread.

    Attributes:
        step: the step that runs; -1 before the first.
        name_of: returns a group's name, and the number of hosts that it spans.
        calls: writes down the communicating ranks in the script's calls; None to write nothing.
    """

    def __init__(self, where: Callable[[], RankPhase]) -> None:
        self._where = where
        # Backward passes communicate on threads of autograd.
        self._lock = threading.Lock()
        self._rows: dict[tuple[int, str, str, str, int, int], tuple[int, int, int, int]] = {}
        self.step = -1
        self.name_of: Callable[[dist.ProcessGroup], tuple[str, int]] = lambda group: ("world", 1)
        self.calls: CallLog | None = None

    def add(self, kind: str, nbytes: int, group: dist.ProcessGroup) -> None:
        """Count a collective of this rank.

        Args:
            nbytes: of the whole tensor.
        """
        members = group.size()
        # A rank that is alone sends nothing.
        if members < 2:
            return
        name, hosts = self.name_of(group)
        share, messages = _SENT.get(kind, _SENT["all_reduce"])
        key = (self.step, self._where().phase, kind, name, members, hosts)
        with self._lock:
            calls, payload, sent, count = self._rows.get(key, (0, 0, 0, 0))
            self._rows[key] = (
                calls + 1,
                payload + nbytes,
                sent + round(share(members) * nbytes),
                count + messages(members),
            )

    def counts(self) -> list[CollectiveCount]:
        """Return all counts, ordered by step."""
        with self._lock:
            rows = sorted(self._rows.items())
        return [
            CollectiveCount(
                step=step,
                phase=phase,
                kind=kind,
                group=group,
                ranks=ranks,
                hosts=hosts,
                calls=calls,
                payload_bytes=payload,
                sent_bytes=sent,
                messages=messages,
            )
            for (step, phase, kind, group, ranks, hosts), (calls, payload, sent, messages) in rows
        ]


class _CountingState(threading.local):
    """Whether what PyTorch is asked for now has been counted already."""

    inside = False


class CountedCollectives:
    """The library's collectives, with each counted; see :class:`~smp_runtime.comm.collectives.Collectives`.

    Args:
        inner: does the work.
        timed: returns a collective with the duration that the rates predict, by kind, bytes of the whole tensor and group; None
            to leave collectives unchanged.
    """

    def __init__(
        self,
        inner: Collectives,
        ledger: CollectiveLedger,
        timed: Callable[[str, int, dist.ProcessGroup, Work], Work] | None = None,
    ) -> None:
        self._inner = inner
        self._ledger = ledger
        self._timed = timed
        self.counted = _CountingState()

    def empty(self, elements: int, dtype: torch.dtype, device: torch.device, group: dist.ProcessGroup) -> torch.Tensor:
        """See :class:`Collectives`."""
        return self._inner.empty(elements, dtype, device, group)

    def all_reduce(self, tensor: torch.Tensor, group: dist.ProcessGroup) -> Work:
        """See :class:`Collectives`."""
        return self._do("all_reduce", tensor, group, lambda: self._inner.all_reduce(tensor, group))

    def broadcast(self, tensor: torch.Tensor, source: int, group: dist.ProcessGroup) -> Work:
        """See :class:`Collectives`."""
        return self._do("broadcast", tensor, group, lambda: self._inner.broadcast(tensor, source, group))

    def reduce_scatter(self, shard: torch.Tensor, full: torch.Tensor, group: dist.ProcessGroup) -> Work:
        """See :class:`Collectives`."""
        return self._do("reduce_scatter", full, group, lambda: self._inner.reduce_scatter(shard, full, group))

    def all_gather(self, full: torch.Tensor, shard: torch.Tensor, group: dist.ProcessGroup) -> Work:
        """See :class:`Collectives`."""
        return self._do("all_gather", full, group, lambda: self._inner.all_gather(full, shard, group))

    def all_to_all(
        self, received: torch.Tensor, sent: torch.Tensor, group: dist.ProcessGroup, sizes: Sizes | None = None
    ) -> Work:
        """See :class:`Collectives`."""
        if sizes is None:
            return self._do("all_to_all", sent, group, lambda: self._inner.all_to_all(received, sent, group))
        # Parts of different sizes leave out this rank's own, so that all of them are sent. Links carry both directions at once.
        busier = sent if sent.nbytes >= received.nbytes else received
        return self._do("send", busier, group, lambda: self._inner.all_to_all(received, sent, group, sizes))

    def _do(self, kind: str, whole: torch.Tensor, group: dist.ProcessGroup, work: Callable[[], Work]) -> Work:
        self._ledger.add(kind, whole.nbytes, group)
        if self._ledger.calls is not None and group.size() > 1:
            self._ledger.calls.of_library(dist.get_process_group_ranks(group))
        # What the inner collective asks of torch.distributed must not count again.
        self.counted.inside = True
        try:
            begun = work()
        finally:
            self.counted.inside = False
        return begun if self._timed is None else self._timed(kind, whole.nbytes, group, begun)


class _FinishedWork:
    """A collective that needed no time. Like one of PyTorch, it keeps its tensors until it is released."""

    def __init__(self, *held: torch.Tensor) -> None:
        self._held = held

    def wait(self) -> None:
        pass


class AbsentCollectives:
    """Collectives with ranks that are not there; see :class:`~smp_runtime.comm.collectives.Collectives`.

    Args:
        buffers: whether a reduce-scatter takes memory for the others' parts until it is over, as over gloo; NCCL needs none.
    """

    def __init__(self, *, buffers: bool) -> None:
        self._buffers = buffers

    def empty(self, elements: int, dtype: torch.dtype, device: torch.device, group: dist.ProcessGroup) -> torch.Tensor:
        """See :class:`Collectives`."""
        return torch.empty(elements, dtype=dtype, device=device)

    def all_reduce(self, tensor: torch.Tensor, group: dist.ProcessGroup) -> Work:
        """See :class:`Collectives`."""
        if tensor.nbytes <= PERFORMED_BYTES:
            _multiply(tensor, group.size())
        else:
            self._sum_tail(tensor, group.size())
        return _FinishedWork(tensor)

    @staticmethod
    def _sum_tail(tensor: torch.Tensor, members: int) -> None:
        """Sum the flags of a bucket, which follow its gradients."""
        end = tensor.detach().view(-1)[-(PERFORMED_BYTES // 2 // tensor.element_size()) :]
        _multiply(end, members)

    def broadcast(self, tensor: torch.Tensor, source: int, group: dist.ProcessGroup) -> Work:
        """See :class:`Collectives`."""
        return _FinishedWork(tensor)

    def reduce_scatter(self, shard: torch.Tensor, full: torch.Tensor, group: dist.ProcessGroup) -> Work:
        """See :class:`Collectives`."""
        parts = torch.empty_like(full) if self._buffers else full
        if full.nbytes <= PERFORMED_BYTES:
            with perform_unwatched():
                shard.detach().view(-1).copy_(full.detach().view(group.size(), -1)[group.rank()])
            _multiply(shard, group.size())
        return _FinishedWork(full, parts, shard)

    def all_gather(self, full: torch.Tensor, shard: torch.Tensor, group: dist.ProcessGroup) -> Work:
        """See :class:`Collectives`."""
        if full.nbytes <= PERFORMED_BYTES:
            with perform_unwatched():
                # A copy: the shard may be a part of the whole tensor, which is written here.
                mine = shard.detach().clone().view(1, -1)
                full.detach().view(group.size(), -1).copy_(mine.expand(group.size(), -1))
        return _FinishedWork(full, shard)

    def all_to_all(
        self, received: torch.Tensor, sent: torch.Tensor, group: dist.ProcessGroup, sizes: Sizes | None = None
    ) -> Work:
        """See :class:`Collectives`."""
        moved = sent if sizes is None else received
        if moved.nbytes > PERFORMED_BYTES:
            return _FinishedWork(received, sent)
        with perform_unwatched():
            if sizes is None:
                received.detach().copy_(sent.detach())
            else:
                received.detach().zero_()  # others send other shapes; memory that was used before may hold any number
        return _FinishedWork(received, sent)


def _multiply(tensor: torch.Tensor, times: int) -> None:
    """Multiply a tensor as a sum over equal ranks would, including flags and indices."""
    with torch.no_grad(), perform_unwatched():
        tensor.detach().mul_(times)


class DirectCollectives:
    """The collectives that a script or the library requests from ``torch.distributed`` itself, as the dispatch mode sees them.

    Attributes:
        counted: ``inside``: whether the caller has counted it already.
    """

    def __init__(self, ledger: CollectiveLedger) -> None:
        self._ledger = ledger
        self.counted = _CountingState()

    def __call__(self, function: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Perform one operation, and count it."""
        name = _NAMES.get(function.__name__.partition(".")[0].strip("_"))
        groups = map(group_of_operation, (*args, *kwargs.values()))
        group = next((found for found in groups if found is not None), None)
        if name is None or group is None or self.counted.inside:
            return function(*args, **kwargs)
        size = sum(tensor.nbytes for tensor in tensors_of(args[0]))
        # A functional collective's argument is this rank's tensor; the first argument of the others is the result.
        is_functional = function.namespace == "_c10d_functional"
        is_rank_s_part = name == "all_gather" if is_functional else name == "reduce_scatter"
        if is_rank_s_part:
            size *= group.size()
        self._ledger.add(name, size, group)
        if self._ledger.calls is not None and group.size() > 1:
            self._ledger.calls.of_script(name, size, dist.get_process_group_ranks(group))
        return function(*args, **kwargs)
