"""Gradient reduction: averages gradients over data parallel ranks, once per window, overlapped with backward.

A *window* is the part of training that one reduction covers: the microbatches of a step (or of
``backward_passes_per_step`` steps), or one ``backward()`` outside a step. A parameter's gradient is final
when backward has added to it as often as in the window before. When all gradients of a bucket are final, the
bucket is launched while backward continues.

Every rank launches the buckets in the same order, independent of the order of its own gradients, so the
collectives always match. A launched gradient leaves its parameter. Backward may still add to it later, if
this window runs another graph than the last one. Then the late part is a gradient of its own, and a second
round sends the late parts and adds them, since averaging is linear.

All ranks must know whether there are late parts, and which parameters any rank used. Therefore the last
bucket always waits for the end of the window and carries these flags behind its gradients. They are summed
over the ranks with the gradients, without a collective of their own. There are two exceptions: a transport
that cannot carry flags, and gradients on GPUs. A host that reads flags from a GPU waits until all work there
is done, so hosts exchange these flags directly.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from smp_config import Group
from smp_runtime.comm.buckets import Bucket, BucketTransport, Travel, make_buckets
from smp_runtime.comm.flag_all_reduce import FlagAllReduce, to_device, travel_by_host
from smp_runtime.data_parallel.bucket_transports import AllReduceTransport, Peers
from smp_runtime.data_parallel.sparse_gradients import SparseReducer
from smp_runtime.tensors.parameter_attributes import get_gradient, set_gradient

if TYPE_CHECKING:
    from smp_runtime.comm.collectives import Collectives
    from smp_runtime.job.ranks import Ranks
    from smp_runtime.parameters.registry import ParameterRegistry


class GradientReducer:
    """Averages the gradients of ``parameters`` over ``group``.

    Args:
        parameters: those with ``requires_grad``; the same, in the same order, on every rank of the group.
        group: the ranks that hold replicas of these parameters.
        ranks: their global numbers, ascending.
        overlap: False launches every bucket at the end of the window.
        reduce_dtype: in which gradients are summed; None means each in its own type.
        bucket_view: gradients of all windows share one buffer, so keep no reference to a gradient over a step.
        buckets: a fixed division instead of one that is measured; with it, ``transport``.
        transport: how buckets travel; default: all-reduce.
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
        reduce_dtype: torch.dtype | None = None,
        bucket_view: bool = False,
        buckets: Sequence[Bucket] | None = None,
        transport: BucketTransport | None = None,
    ) -> None:
        self._parameters = list(parameters)
        self._group = group
        self._ranks = list(ranks)
        self._collectives = collectives
        self._bucket_bytes = bucket_bytes
        self._overlap = overlap
        self._reduce_dtype = reduce_dtype
        self._bucket_view = bucket_view
        self._transport: BucketTransport = transport or AllReduceTransport(collectives, group)
        count = len(self._parameters)
        self._expected: list[int] | None = None  # how often backward adds to each gradient, learned in a window
        self._seen = [0] * count
        self._used = [False] * count
        self._arrival: list[int] = []  # indices in the order in which gradients became final
        self._travels: list[Travel] = []
        self._late = False
        self._reduces = True
        self._windows = 0  # that were reduced, the same on all ranks
        self._order_is_fixed = buckets is not None
        # Until measured, guess that backward runs in the reverse order of registration.
        devices = {parameter.device for parameter in self._parameters}
        self._by_host = any(travel_by_host(device, len(self._ranks)) for device in devices)
        if buckets is None:
            buckets = self._buckets_in(list(reversed(range(count))))
        self._set_buckets(list(buckets))
        self._handles = [
            parameter.register_post_accumulate_grad_hook(self._hook(index))
            for index, parameter in enumerate(self._parameters)
        ]
        self.begin_window(reduces=True)

    @property
    def touched(self) -> bool:
        """Return whether backward has added to any gradient in this window."""
        return any(self._seen)

    @property
    def bucket_order(self) -> list[list[int]]:
        """Return the indices of the parameters of each bucket, in the order of launching."""
        return [list(bucket.indices) for bucket in self._buckets]

    def use_transport(self, make: Callable[[Sequence[torch.Tensor], Peers], BucketTransport]) -> None:
        """Replace the transport, between windows; ``make`` gets the parameters and the ranks that average them."""
        self._transport = make(self._parameters, Peers(self._group, self._collectives))
        self._set_buckets(self._buckets)

    def begin_window(self, *, reduces: bool) -> None:
        """Expect gradients; with ``reduces=False`` they only accumulate and nothing is sent."""
        count = len(self._parameters)
        self._reduces = reduces
        self._seen = [0] * count
        self._used = [False] * count
        self._arrival = []
        self._travels = []
        self._late = False
        for bucket in self._buckets:
            bucket.pending = len(bucket.indices)

    @torch.no_grad()
    def finish_window(self, *, measures: bool = True) -> None:
        """Send what is left, wait for everything, and write the averages into the gradients.

        A parameter that no rank used keeps no gradient; one that only other ranks used gets theirs.

        Args:
            measures: False for a window without a backward pass of its own, from which no order of buckets can be learned.
        """
        if not self._reduces or not self._buckets:
            return
        results, used, late = self._send_and_finish()
        if late:
            # The parameters now hold only the late part. Copy kept buffers, which are about to be overwritten.
            results = [r.clone() if b.persistent else r for r, b in zip(results, self._buckets, strict=True)]
            self._travels = []
            late_results, used, _ = self._send_and_finish()
            results = [first.add_(second) for first, second in zip(results, late_results, strict=True)]
        self._adopt(results, used)
        for bucket in self._buckets:
            bucket.release()
        if not measures:
            return
        self._windows += 1
        if self.touched:  # else this rank has only answered the others, and has learned nothing
            self._expected = list(self._seen)
        if self._windows > 1 and not self._order_is_fixed:
            self._adopt_measured_order()

    def close(self) -> None:
        """Remove the hooks from the parameters."""
        for handle in self._handles:
            handle.remove()

    # -- while backward runs ---------------------------------------------------------------------------------------

    def _hook(self, index: int) -> Callable[[torch.Tensor], None]:
        # The garbage collector cannot follow parameter → hook references; a strong reference would leak the reducer.
        weak = weakref.ref(self)

        def gradient_added(_: torch.Tensor) -> None:
            if (reducer := weak()) is not None:
                reducer.gradient_added(index)

        return gradient_added

    @torch.no_grad()
    def gradient_added(self, index: int) -> None:
        """Count what backward has added to a gradient; the last that a window expects may complete a bucket."""
        self._seen[index] += 1
        if not self._reduces or self._expected is None:
            return
        seen, expected = self._seen[index], self._expected[index]
        position, bucket = self._place[index]
        if seen == expected:
            self._arrival.append(index)
            bucket.pending -= 1
            # Not the last bucket if it carries the flags, which are only known at the end of the window.
            launched, most = len(self._travels), len(self._buckets) - self._carries_tail
            while self._overlap and launched < most and not self._buckets[launched].pending:
                self._launch_next()
                launched += 1
        elif seen > expected and position < len(self._travels):
            self._late = True

    def _launch_next(self) -> None:
        position = len(self._travels)
        bucket = self._buckets[position]
        buffer = bucket.fresh_buffer(self._collectives, self._group)
        # Averaging before the sum keeps half precision sums in range.
        scale = 1.0 / len(self._ranks) if self._transport.divides else 1.0
        for index, view in zip(bucket.indices, bucket.views(buffer, self._parameters), strict=True):
            parameter = self._parameters[index]
            gradient = get_gradient(parameter)
            if gradient is None:
                view.zero_()
                continue
            self._used[index] = True
            gradient = gradient.to_dense() if gradient.is_sparse else gradient
            if gradient.dtype == view.dtype:
                torch.mul(gradient, scale, out=view)
            else:  # widen before scaling, or the product is rounded in the narrow type
                view.copy_(gradient).mul_(scale)
            set_gradient(parameter, None)
        if bucket.tail:
            buffer[bucket.elements :].copy_(to_device(self._flags(bucket.dtype), bucket.device))
        is_last = position == len(self._buckets) - 1
        self._travels.append(self._transport.launch(bucket, buffer, position, is_last))

    @property
    def _carries_tail(self) -> bool:
        """Return whether flags travel behind the gradients of the last bucket."""
        return self._transport.carries_tail and not self._by_host

    def _flags(self, dtype: torch.dtype) -> torch.Tensor:
        """Return the flags: 1 for each parameter that this rank used, and 1 if it has late gradients."""
        return torch.tensor([*self._used, self._late], dtype=dtype, device="cpu")

    # -- at the end of the window ----------------------------------------------------------------------------------

    def _send_and_finish(self) -> tuple[list[torch.Tensor], list[bool], bool]:
        """Launch what is left and wait for all buckets.

        Returns:
            Their results, which parameters any rank used, and whether any rank has late gradients.
        """
        while len(self._travels) < len(self._buckets):
            self._launch_next()
        early = self._launched_flags() if self._by_host else None
        results = [travel.finish() for travel in self._travels]
        if self._carries_tail:
            flags = results[-1][self._buckets[-1].elements :]
        elif early is not None:
            flags = early.finish()
        else:  # not before a hook of the script is done, which may communicate too, from gloo's own threads
            flags = self._launched_flags().finish()
        *used, late = ((flags.real if flags.is_complex() else flags) > 0).tolist()
        return results, used, late

    def _launched_flags(self) -> FlagAllReduce:
        device = self._buckets[-1].device
        return FlagAllReduce(self._flags(torch.float32), device, self._collectives, self._group, len(self._ranks))

    def _adopt(self, results: list[torch.Tensor], used: list[bool]) -> None:
        for position, (bucket, result) in enumerate(zip(self._buckets, results, strict=True)):
            if not self._transport.lands_in_gradients:
                self._transport.deliver(position, result, used)
                continue
            views = bucket.views(result, self._parameters)
            for index, view in zip(bucket.indices, views, strict=True):
                if used[index]:
                    parameter = self._parameters[index]
                    is_same_type = view.dtype == parameter.dtype
                    set_gradient(parameter, view if is_same_type else view.to(parameter.dtype))

    # -- order -----------------------------------------------------------------------------------------------------

    def _adopt_measured_order(self) -> None:
        """Order the buckets as gradients really arrive; the group's first rank decides for all."""
        self._order_is_fixed = True
        known = set(self._arrival)
        arrived = self._arrival + [i for i in reversed(range(len(self._parameters))) if i not in known]
        order = torch.tensor(arrived, device=self._buckets[0].device)
        self._collectives.broadcast(order, self._ranks[0], self._group).wait()
        self._set_buckets(self._buckets_in(order.tolist()))

    def _buckets_in(self, order: list[int]) -> list[Bucket]:
        return make_buckets(
            self._parameters, order, self._bucket_bytes, reduce_dtype=self._reduce_dtype, persistent=self._bucket_view
        )

    def _set_buckets(self, buckets: list[Bucket]) -> None:
        self._buckets = buckets
        for bucket in buckets:
            bucket.tail = 0
        if buckets and self._carries_tail:
            buckets[-1].tail = len(self._parameters) + 1
        self._place = {}
        for position, bucket in enumerate(buckets):
            self._place.update(dict.fromkeys(bucket.indices, (position, bucket)))


class ReducerSet:
    """Several reducers that are used like one :class:`GradientReducer`."""

    def __init__(self, reducers: Sequence[GradientReducer | SparseReducer]) -> None:
        self._reducers = list(reducers)

    @property
    def touched(self) -> bool:
        """Return whether backward has added to any gradient in this window."""
        return any(reducer.touched for reducer in self._reducers)

    @property
    def bucket_order(self) -> list[list[int]]:
        """Return the indices of the parameters of each bucket, reducer after reducer."""
        buckets: list[list[int]] = []
        for reducer in self._reducers:
            buckets += reducer.bucket_order
        return buckets

    def use_transport(self, make: Callable[[Sequence[torch.Tensor], Peers], BucketTransport]) -> None:
        """Replace every reducer's transport; see :meth:`GradientReducer.use_transport`."""
        for reducer in self._reducers:
            reducer.use_transport(make)

    def begin_window(self, *, reduces: bool) -> None:
        """Expect gradients."""
        for reducer in self._reducers:
            reducer.begin_window(reduces=reduces)

    def finish_window(self, *, measures: bool = True) -> None:
        """Wait for everything, and write the averages into the gradients."""
        for reducer in self._reducers:
            reducer.finish_window(measures=measures)

    def close(self) -> None:
        """Remove the hooks from the parameters."""
        for reducer in self._reducers:
            reducer.close()


Reducer = GradientReducer | ReducerSet


def sharing_group(ranks: Ranks) -> Group:
    """Return the group of ranks that divide the optimizer state.

    These ranks have the same parameters, including distributed ones.
    """
    return Group.DP if ranks.size(Group.TP) == 1 else Group.RDP


def seeing_own_batch(
    registry: ParameterRegistry, trained: Sequence[torch.nn.Parameter], ranks: Ranks
) -> list[torch.nn.Parameter]:
    """Return the parameters that only see this rank's batch.

    Their gradients differ within a tensor parallel group, because its ranks have different batches.
    """
    is_one_batch = ranks.size(Group.TP) == 1 or ranks.cfg.prescaled_batch
    if is_one_batch:
        return []
    return [parameter for parameter in trained if registry.record_of(parameter).reduction is Group.DP]


def batch_shares(registry: ParameterRegistry, trained: Sequence[torch.nn.Parameter], ranks: Ranks) -> list[float]:
    """Return the factor for each parameter's gradient, as backward adds it, that makes it this rank's share.

    With a batch per rank, the gradient of a distributed layer is the sum over the tensor parallel group's batches. It is divided at
    once, not with the average over the replicas, which is taken again if another step adds to the gradient.
    """
    if ranks.size(Group.TP) == 1 or ranks.cfg.prescaled_batch:
        return [1.0] * len(trained)
    share = ranks.size(Group.RDP) / ranks.size(Group.DP)
    return [share if registry.record_of(parameter).reduction is Group.RDP else 1.0 for parameter in trained]


def make_reducer(
    registry: ParameterRegistry,
    trained: Sequence[torch.nn.Parameter],
    ranks: Ranks,
    *,
    sparse: Iterable[torch.nn.Parameter] = (),
    **options: Any,
) -> Reducer:
    """Return a reducer that averages the gradients of ``trained``, each over its record's group.

    Args:
        sparse: those parameters among them with sparse gradients, which stay sparse.
        options: as of a :class:`GradientReducer`; with ``buckets`` all gradients are made dense.
    """
    by_group: dict[Group, list[torch.nn.Parameter]] = {}
    tables = set(trained).intersection(sparse) if options.get("buckets") is None else set()
    if options.get("buckets") is not None:  # one order for all; all ranks with batches agree on the used parameters
        by_group[sharing_group(ranks) if ranks.cfg.prescaled_batch else Group.DP] = list(trained)
    else:
        for parameter in trained:
            if parameter not in tables:
                by_group.setdefault(registry.record_of(parameter).reduction, []).append(parameter)
    reducers: list[GradientReducer | SparseReducer] = [
        GradientReducer(
            by_group.get(group, []),
            ranks.groups.group(group),
            ranks.members(group),
            ranks.collectives,
            **options,
        )
        for group in sorted(by_group or {Group.DP: []}, key=lambda group: group.value)
    ]
    for group in sorted({registry.record_of(table).reduction for table in tables}, key=lambda group: group.value):
        alike = [p for p in trained if p in tables and registry.record_of(p).reduction is group]
        reducers.append(SparseReducer(alike, ranks.groups.group(group), ranks.collectives, len(ranks.members(group))))
    first = reducers[0]
    return first if len(reducers) == 1 and isinstance(first, GradientReducer) else ReducerSet(reducers)


_Gradients = tuple[torch.Tensor | None, ...]


class AccumulationScale:
    """Multiplies what ``backward()`` adds to the gradients of ``parameters``, by ``factor()`` times the share of each.

    ``torch.autograd.grad`` is left alone.

    Hooks of a tensor see both. So these are hooks of the graph's nodes that accumulate; each lasts as long as it is
    kept, and as its parameter stays of one type and on one device.
    """

    def __init__(
        self, parameters: Sequence[torch.Tensor], shares: Sequence[float], factor: Callable[[], float]
    ) -> None:
        self._parameters = list(parameters)
        self._shares = list(shares)
        self._factor = factor
        self._kinds: list[tuple[torch.dtype, torch.device] | None] = [None] * len(self._parameters)
        self._nodes: list[torch.autograd.graph.Node | None] = [None] * len(self._parameters)
        self.refresh()

    def refresh(self) -> None:
        """Follow parameters that have been cast or moved."""
        weak = weakref.ref(self)  # the garbage collector does not look into nodes

        def hook(share: float, gradients: _Gradients) -> _Gradients | None:
            me = weak()
            return None if me is None else me.scaled(gradients, share)

        for index, parameter in enumerate(self._parameters):
            kind = (parameter.dtype, parameter.device)
            if kind != self._kinds[index] and parameter.requires_grad:
                node = torch.autograd.graph.get_gradient_edge(parameter).node
                node.register_prehook(functools.partial(hook, self._shares[index]))
                self._kinds[index], self._nodes[index] = kind, node

    def scaled(self, gradients: _Gradients, share: float) -> _Gradients | None:
        """Return the scaled gradients to add instead of ``gradients``; None if the factor is 1."""
        factor = self._factor() * share
        if factor == 1.0:
            return None
        return tuple(None if g is None else g * factor for g in gradients)
