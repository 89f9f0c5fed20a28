"""Gradient reduction: averages gradients over data parallel ranks, once per window, overlapped with backward.

A *window* is what one reduction covers: the microbatches of a step (or of ``backward_passes_per_step`` steps), or
one ``backward()`` outside a step. A parameter's gradient is final when backward has added to it as often as in the
window before; when all gradients of a bucket are final, the bucket's all-reduce starts while backward goes on.

Every rank starts the buckets in the same order, whatever order its own gradients come in, so the collectives
always match. The last bucket always waits for the end of the window and carries two kinds of flags behind its
gradients, summed over all ranks with them: which parameters were used anywhere, and whether some rank started a
bucket too early (a gradient changed after it was sent, because this window ran another graph than the last); in
that case all ranks reduce again. This costs no collective of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from smp_runtime.comm.collectives import Collectives, Work
from smp_runtime.data_parallel.buckets import Bucket, make_buckets


class GradientReducer:
    """Averages the gradients of ``parameters`` over ``group``.

    Args:
        parameters: those with ``requires_grad``; the same, in the same order, on every rank of the group.
        group: the ranks that hold replicas of these parameters.
        ranks: their global numbers, ascending.
        collectives: the seam to communicate through.
        bucket_bytes: size of a bucket; the first one started is smaller, so that communication begins early.
        overlap: False starts every bucket at the end of the window.
    """

    def __init__(
        self,
        parameters: Sequence[torch.nn.Parameter],
        group: dist.ProcessGroup,
        ranks: Sequence[int],
        collectives: Collectives,
        *,
        bucket_bytes: int = 25 * 2**20,
        overlap: bool = True,
    ) -> None:
        self._parameters = list(parameters)
        self._group = group
        self._ranks = list(ranks)
        self._collectives = collectives
        self._bucket_bytes = bucket_bytes
        self._overlap = overlap
        count = len(self._parameters)
        self._expected: list[int] | None = None  # how often backward adds to each gradient, learned in a window
        self._seen = [0] * count
        self._arrival: list[int] = []  # indices in the order in which gradients became final
        self._started = 0
        self._works: list[tuple[Bucket, Work]] = []
        self._stale = False
        self._reduces = True
        self._order_is_measured = False
        # Until measured, guess that backward runs in the reverse order of registration.
        self._set_order(list(reversed(range(count))))
        self._handles = [
            parameter.register_post_accumulate_grad_hook(self._hook(index))
            for index, parameter in enumerate(self._parameters)
        ]

    def begin_window(self, *, reduces: bool) -> None:
        """Expect gradients; with ``reduces=False`` they only accumulate and nothing is sent."""
        self._reduces = reduces
        self._seen = [0] * len(self._parameters)
        self._arrival = []
        self._started = 0
        self._works = []
        self._stale = False
        for bucket in self._buckets:
            bucket.pending = len(bucket.indices)

    @property
    def touched(self) -> bool:
        """Whether backward has added to any gradient in this window."""
        return any(self._seen)

    def finish_window(self) -> None:
        """Send what is left, wait for everything, and write the averages into the gradients.

        A parameter that no rank used keeps its gradient as it was; one that only other ranks used gets theirs.
        """
        if not self._reduces or not self._buckets:
            return
        while self._started < len(self._buckets):
            self._start_next()
        flags = self._wait_for_flags()
        if flags[
            -1
        ]:  # some rank sent a gradient that changed afterwards: the local gradients are intact, so send again
            self._works = []
            self._started = 0
            self._stale = False
            while self._started < len(self._buckets):
                self._start_next()
            flags = self._wait_for_flags()
        for bucket, _ in self._works:
            self._write_back(bucket, flags)
        measured = not self._order_is_measured and self._expected is not None
        self._expected = list(self._seen)
        if measured:
            self._adopt_measured_order()

    def close(self) -> None:
        """Take the hooks off the parameters."""
        for handle in self._handles:
            handle.remove()

    def _hook(self, index: int) -> Callable[[torch.Tensor], None]:
        def gradient_added(_: torch.Tensor) -> None:
            self._gradient_added(index)

        return gradient_added

    def _gradient_added(self, index: int) -> None:
        self._seen[index] += 1
        if not self._reduces or self._expected is None:
            return
        seen, expected = self._seen[index], self._expected[index]
        position, bucket = self._place[index]
        if seen == expected:
            self._arrival.append(index)
            bucket.pending -= 1
            # All but the last bucket, whose flags are only known at the end of the window.
            while self._overlap and self._started < len(self._buckets) - 1 and not self._buckets[self._started].pending:
                self._start_next()
        elif seen > expected and position < self._started:
            self._stale = True

    def _start_next(self) -> None:
        position = self._started
        bucket = self._buckets[position]
        # Averaging before the sum keeps half precision sums in range.
        scale = 1.0 / len(self._ranks)
        for index, view in zip(bucket.indices, bucket.views(self._parameters), strict=True):
            gradient = self._parameters[index].grad
            if gradient is None:
                view.zero_()
            else:
                torch.mul(gradient.to_dense() if gradient.is_sparse else gradient, scale, out=view)
        if bucket.tail:
            used = [float(parameter.grad is not None) for parameter in self._parameters]
            bucket.tail_view().copy_(torch.tensor([*used, float(self._stale)], dtype=bucket.dtype))
        self._works.append((bucket, self._collectives.all_reduce(bucket.buffer, self._group)))
        self._started = position + 1

    def _wait_for_flags(self) -> list[bool]:
        for _, work in self._works:
            work.wait()
        return [flag > 0 for flag in self._buckets[-1].tail_view().tolist()]

    def _write_back(self, bucket: Bucket, flags: list[bool]) -> None:
        for index, view in zip(bucket.indices, bucket.views(self._parameters), strict=True):
            parameter = self._parameters[index]
            if not flags[index]:
                continue
            if parameter.grad is None or parameter.grad.is_sparse:
                parameter.grad = view.clone()
            else:
                parameter.grad.copy_(view)

    def _adopt_measured_order(self) -> None:
        """Order the buckets as gradients really arrive; the group's first rank decides for all."""
        self._order_is_measured = True
        known = set(self._arrival)
        arrived = self._arrival + [i for i in reversed(range(len(self._parameters))) if i not in known]
        order = torch.tensor(arrived, device=self._buckets[0].device)
        self._collectives.broadcast(order, self._ranks[0], self._group).wait()
        self._set_order(order.tolist())

    def _set_order(self, order: list[int]) -> None:
        self._buckets = make_buckets(self._parameters, order, self._bucket_bytes, tail=len(self._parameters) + 1)
        self._place = {
            index: (position, bucket) for position, bucket in enumerate(self._buckets) for index in bucket.indices
        }
