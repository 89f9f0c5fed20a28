"""The smallest clusters that train a model: instance types with the number of instances that each needs."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from smp_config import ConfigError
from smp_config.machine.instances import Instance, instances
from smp_estimator.planning.forecast import TIGHT_ABOVE
from smp_estimator.planning.request import OPTIMIZER_BYTES, Request
from smp_estimator.planning.search.heuristic_steps import TriedConfiguration, first_fit

if TYPE_CHECKING:
    from smp_estimator.planning.plan import Plan

#: Most instances of one cluster that are tried.
MOST_INSTANCES = 1024

#: Clusters that are shown.
SHOWN = 6

#: Counts that are tried for each type when the type is open too, from the least that could hold the state.
_TRIES = 6


@dataclass(frozen=True)
class Cluster:
    """Instances on which a model fits, and the first configuration of the best practices with which it does."""

    step: TriedConfiguration

    @property
    def plan(self) -> Plan:
        """Return the plan of that configuration."""
        return self.step.plan

    @property
    def instance_type(self) -> str:
        """Return the instance type, such as ``"ml.p4d.24xlarge"``."""
        return self.plan.request.instance_type

    @property
    def instance_count(self) -> int:
        """Return the number of instances."""
        return self.plan.request.instance_count

    @property
    def gpus(self) -> int:
        """Return the number of GPUs, one for each process."""
        return self.plan.request.world

    @property
    def memory_bytes(self) -> int:
        """Return the memory of all its GPUs."""
        return self.gpus * (self.plan.request.gpu_memory_bytes or 0)

    @property
    def is_slow(self) -> bool:
        """Return whether several instances are joined without EFA."""
        known = self.plan.instance
        return self.instance_count > 1 and known is not None and not known.efa

    @property
    def size(self) -> tuple[float, ...]:
        """Return the sort key: a fast network first, then fewer instances, less total memory, fewer GPUs."""
        known = self.plan.instance
        host = known.host_memory_bytes if known else 0
        return (self.is_slow, self.instance_count, self.memory_bytes, self.gpus, host)

    def __str__(self) -> str:
        return f"{self.instance_count} × {self.instance_type}"


#: Makes the request of a cluster and its samples per optimizer step.
Ask = Callable[[str, int], tuple[Request, int]]


def smallest_cluster(ask: Ask, kind: str, tries: int = MOST_INSTANCES) -> Cluster | None:
    """Return the fewest instances of one type that a model fits on; None if none of ``tries`` counts is enough."""
    request, _ = ask(kind, 1)
    for count, _ in zip(_counts(least_count(request)), range(tries), strict=False):
        if (found := cluster_of(ask, kind, count)) is not None:
            return found
    return None


def cluster_of(ask: Ask, kind: str, count: int) -> Cluster | None:
    """Return the cluster of ``count`` instances if the model fits on it, else None."""
    try:
        request, samples = ask(kind, count)
    except ConfigError:
        return None  # this type has fewer GPUs than processes were asked for
    step = first_fit(request, samples)
    return None if step is None else Cluster(step)


def smallest_clusters(ask: Ask, count: int | None = None) -> tuple[Cluster, ...]:
    """Return the smallest clusters of all types that current builds of PyTorch run on, the smallest first.

    Args:
        count: only clusters of so many instances.
    """
    found: list[Cluster] = []
    for needed, name in sorted(_least_counts(ask)):
        fast = sorted(cluster.instance_count for cluster in found if not cluster.is_slow)
        has_enough = len(fast) >= SHOWN and needed > fast[SHOWN - 1]
        if needed > MOST_INSTANCES or has_enough:
            break  # no later one is smaller than those that there are
        if count is not None and count < needed:
            continue
        cluster = smallest_cluster(ask, name, _TRIES) if count is None else cluster_of(ask, name, count)
        if cluster is not None:
            found.append(cluster)
    return _distinct(found)[:SHOWN]


def _distinct(found: list[Cluster]) -> tuple[Cluster, ...]:
    """Return clusters, the smallest first; of those that differ only in their network, the first."""
    distinct: dict[tuple[object, ...], Cluster] = {}
    for cluster in sorted(found, key=lambda each: each.size):
        known = cluster.plan.instance
        gpu = known.gpu if known else ""
        distinct.setdefault((gpu, cluster.memory_bytes, cluster.instance_count), cluster)
    return tuple(distinct.values())


def _least_counts(ask: Ask) -> Iterator[tuple[int, str]]:
    """Yield the least number of instances that may hold the model, and the name, of each type."""
    for kind in _kinds():
        try:
            request, _ = ask(kind.name, 1)
            yield least_count(request), kind.name
        except ConfigError:
            continue  # fewer GPUs than processes were asked for


def least_count(request: Request) -> int:
    """Return the fewest instances with enough GPU memory for the state, divided over all of them."""
    each = 8 + OPTIMIZER_BYTES[request.workload.optimizer]  # parameter, gradient and master copy, in any precision
    device = TIGHT_ABOVE * (request.gpu_memory_bytes or math.inf)
    return max(1, math.ceil(each * request.shape.parameters / (device * request.processes_per_host)))


def current_types() -> Iterator[Instance]:
    """Return an iterator over the types with GPUs that all builds of PyTorch for CUDA 12 and newer have code for."""
    return (known for known in instances() if known.gpu_facts.dropped_by_cuda is None)


def _kinds() -> Iterator[Instance]:
    """Yield one type per kind of GPUs and network: the one with the least host memory."""
    best: dict[tuple[object, ...], Instance] = {}
    for known in current_types():
        key = (known.gpu, known.gpu_memory_bytes, known.gpus, known.efa)
        if key not in best or known.host_memory_bytes < best[key].host_memory_bytes:
            best[key] = known
    yield from best.values()


def _counts(least: int) -> Iterator[int]:
    """Yield 1 to 8, then 10, 12, 14, 16, 20, …: four between a power of two and the next; from ``least`` on."""
    power = 1
    while power <= MOST_INSTANCES:
        for quarter in range(4):
            count, rest = divmod(power * (4 + quarter), 4)
            is_whole = rest == 0
            if is_whole and least <= count <= MOST_INSTANCES:
                yield count
        power *= 2
