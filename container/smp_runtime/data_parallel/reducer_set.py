"""Several gradient reducers as one: parameters whose gradients are averaged over different groups of ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from smp_config import Group
from smp_runtime.data_parallel.reducer import GradientReducer
from smp_runtime.errors import SMPUserError

if TYPE_CHECKING:
    import torch

    from smp_runtime.comm.bucket_transport import Transport
    from smp_runtime.job.ranks import Ranks
    from smp_runtime.parameters.registry import ParameterRegistry


class ReducerSet:
    """Does with each of its reducers what a :class:`GradientReducer` does."""

    def __init__(self, reducers: Sequence[GradientReducer]) -> None:
        self._reducers = list(reducers)

    @property
    def touched(self) -> bool:
        """Whether backward has added to any gradient in this window."""
        return any(reducer.touched for reducer in self._reducers)

    @property
    def bucket_order(self) -> list[list[int]]:
        """Indices of the parameters of each bucket, reducer after reducer."""
        return [bucket for reducer in self._reducers for bucket in reducer.bucket_order]

    def use_transport(self, make: Callable[[Sequence[torch.Tensor]], Transport]) -> None:
        """Replace every reducer's transport, between windows; ``make`` gets the parameters."""
        for reducer in self._reducers:
            reducer.use_transport(make)

    def begin_window(self, *, reduces: bool) -> None:
        """Expect gradients."""
        for reducer in self._reducers:
            reducer.begin_window(reduces=reduces)

    def finish_window(self) -> None:
        """Wait for everything, and write the averages into the gradients."""
        for reducer in self._reducers:
            reducer.finish_window()

    def close(self) -> None:
        """Take the hooks off the parameters."""
        for reducer in self._reducers:
            reducer.close()


Reducer = GradientReducer | ReducerSet


def sharing_group(ranks: Ranks) -> Group:
    """The ranks that share out the optimizer's state of all parameters among them.

    Raises:
        SMPUserError: there are none: with a batch per tensor parallel rank, ordinary layers are averaged over more ranks
            than hold the parts of distributed ones.
    """
    if ranks.size(Group.TP) == 1:
        return Group.DP
    if not ranks.cfg.prescaled_batch:
        raise SMPUserError(
            f"shard_optimizer_state is true and tensor_parallel_degree is {ranks.size(Group.TP)}, but every tensor parallel rank "
            "has a batch of its own, so that ordinary and distributed layers are averaged over different ranks; set "
            '"prescaled_batch": True, or turn shard_optimizer_state off'
        )
    return Group.RDP


def make_reducer(
    registry: ParameterRegistry, trained: Sequence[torch.nn.Parameter], ranks: Ranks, **options: Any
) -> Reducer:
    """What averages the gradients of ``trained``, each over its record's group; ``options`` as of a reducer."""
    by_group: dict[Group, list[torch.nn.Parameter]] = {}
    shares = options.get("buckets") is not None
    for parameter in trained:
        group = sharing_group(ranks) if shares else registry.record_of(parameter).reduction
        by_group.setdefault(group, []).append(parameter)
    # With a batch per rank, the gradient of a distributed layer is the sum over the tensor parallel group's batches.
    divisors = {Group.DP: ranks.size(Group.DP)}
    divisors[Group.RDP] = ranks.size(Group.RDP if ranks.cfg.prescaled_batch else Group.DP)
    reducers = [
        GradientReducer(
            by_group.get(group, []),
            ranks.groups.group(group),
            ranks.members(group),
            ranks.collectives,
            divisor=divisors[group],
            **options,
        )
        for group in sorted(by_group or {Group.DP: []}, key=lambda group: group.value)
    ]
    return reducers[0] if len(reducers) == 1 else ReducerSet(reducers)
