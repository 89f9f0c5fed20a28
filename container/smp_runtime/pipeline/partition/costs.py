"""Predicted costs of an assignment of modules to stages: memory, work, and the traffic between stages.

Everything is relative: the costs of all stages, without traffic, add up to 1. A stage's cost is
``memory_weight`` times its share of the bytes plus ``1 - memory_weight`` times its share of the work. Work
counts in operations (the same on every machine) unless execution times were traced.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from smp_runtime.errors import SMPUserError

if TYPE_CHECKING:
    from smp_runtime.pipeline.partition.module_tree import ModuleNode, Trace

#: Operations that a device does while one byte crosses the link to another stage, and nothing hides it.
LINK_OPERATIONS = 500.0
#: Cost, in mean stages, of a part of a module on another stage than the module's own frame. Its calls go there and
#: back, and may wait for their turn. A cut deep inside costs this for every module that it splits.
ROUND_TRIP = 0.1


@dataclass(frozen=True)
class CostSettings:
    """The weights and parameters of the cost model."""

    memory_weight: float = 0.8  # 0 balances work only, 1 memory only
    in_flight: tuple[int, ...] = ()  # microbatches with activations on each stage at once; empty means one each
    optimizer_bytes: float = 8.0  # optimizer state (and master weights) per element of a trained parameter
    link_operations: float = LINK_OPERATIONS  # see :data:`LINK_OPERATIONS`; 0 makes traffic free
    round_trip: float = ROUND_TRIP  # see :data:`ROUND_TRIP`


@dataclass(frozen=True)
class Need:
    """The memory and work of modules, on any stage."""

    fixed: float = 0.0  # bytes of parameters, gradients and optimizer state
    activations: float = 0.0  # bytes kept for backward, of one microbatch
    work: float = 0.0  # operations, or seconds if they were traced

    def __add__(self, other: Need) -> Need:
        return Need(self.fixed + other.fixed, self.activations + other.activations, self.work + other.work)


@dataclass(frozen=True)
class Charge:
    """A cost that arises between stages: once for a stage that receives something, once for the one that sends it."""

    producer: str  # path of a module; its stage sends to every other stage that has one of the consumers
    consumers: tuple[str, ...]  # paths
    cost: float  # relative, as the costs of stages


@dataclass
class StageCost:
    """The prediction for one stage."""

    elements: int = 0  # parameters
    memory_bytes: float = 0.0  # parameters, gradients, optimizer state and activations of all microbatches in flight
    memory: float = 0.0  # share of all bytes
    work: float = 0.0  # share of all work
    traffic: float = 0.0  # what sending and receiving adds
    cost: float = 0.0  # all of these, weighed


@dataclass
class CostModel:
    """The costs of one model over a number of stages.

    Raises:
        SMPUserError: settings that do not fit the number of stages.
    """

    trace: Trace
    stages: int
    settings: CostSettings = field(default_factory=CostSettings)

    def __post_init__(self) -> None:
        settings = self.settings
        if not 0 <= settings.memory_weight <= 1:
            raise SMPUserError(
                f"memory_weight is {settings.memory_weight}; it weighs memory against work: use a number from 0 to 1",
                code="SMP305",
            )
        if settings.in_flight and len(settings.in_flight) != self.stages:
            raise SMPUserError(
                f"in_flight has {len(settings.in_flight)} numbers for {self.stages} stages; give one for each stage",
                code="SMP305",
            )
        self.in_flight: Sequence[int] = settings.in_flight or (1,) * self.stages
        self.needs: dict[str, Need] = {}
        counted: set[str] = set()
        for node in self.trace.root.walk():
            fresh = [held for held in node.parameters if held.name not in counted]
            counted.update(held.name for held in fresh)
            # A gradient is as large as its parameter.
            trained = sum(held.bytes + settings.optimizer_bytes * held.elements for held in fresh if held.trained)
            work = node.seconds if self.trace.timed else node.flops
            self.needs[node.path] = Need(sum(held.bytes for held in fresh) + trained, node.activation_bytes, work)
        total = sum(self.needs.values(), Need())
        mean_in_flight = sum(self.in_flight) / self.stages
        self.total_bytes = total.fixed + total.activations * mean_in_flight or 1.0
        self.total_work = total.work or 1.0
        self.charges = self._charges()

    def share(self, need: Need, in_flight: float) -> float:
        """Return the cost of modules, without traffic, on a stage with the activations of ``in_flight`` microbatches."""
        memory = (need.fixed + need.activations * in_flight) / self.total_bytes
        weight = self.settings.memory_weight
        return weight * memory + (1 - weight) * need.work / self.total_work

    def subtree(self, node: ModuleNode) -> Need:
        """Return the memory and work of a module and all its submodules."""
        return sum((self.needs[inner.path] for inner in node.walk()), Need())

    def stage_costs(self, stage_of: Callable[[str], int]) -> list[StageCost]:
        """Return the costs of every stage for any assignment of paths to stages."""
        costs = [StageCost() for _ in range(self.stages)]
        needs = [Need()] * self.stages
        counted: set[str] = set()
        for node in self.trace.root.walk():
            stage = stage_of(node.path)
            needs[stage] += self.needs[node.path]
            for held in node.parameters:
                if held.name not in counted:
                    counted.add(held.name)
                    costs[stage].elements += held.elements
        for charge in self.charges:
            sender = stage_of(charge.producer)
            receivers = {stage_of(path) for path in charge.consumers} - {sender}
            for stage in [sender, *receivers] if receivers else []:
                costs[stage].traffic += charge.cost
        for stage, (cost, need) in enumerate(zip(costs, needs, strict=True)):
            cost.memory_bytes = need.fixed + need.activations * self.in_flight[stage]
            cost.memory = cost.memory_bytes / self.total_bytes
            cost.work = need.work / self.total_work
            cost.cost = self.share(need, self.in_flight[stage]) + cost.traffic
        return costs

    def _charges(self) -> list[Charge]:
        weight = 1 - self.settings.memory_weight
        # Operations on bytes that cross become a share of all work; with traced seconds, of the same work by count.
        operations = sum(node.flops for node in self.trace.root.walk())
        per_byte = weight * self.settings.link_operations / (operations or 1.0)
        charges = [Charge(flow.producer, flow.consumers, flow.bytes * per_byte) for flow in self.trace.flows]
        charges += self._call_charges()
        return [charge for charge in charges if charge.cost > 0]

    def _call_charges(self) -> Iterator[Charge]:
        """Yield the costs of calls from modules to the modules inside them, if these are on other stages."""
        round_trip = self.settings.round_trip / self.stages
        for node in self.trace.root.walk():
            if node.is_container:
                continue
            inside = tuple(inner.path for inner in node.walk() if not inner.is_container)
            # The first is the module itself.
            if len(inside) > 1:
                yield Charge(node.path, inside[1:], round_trip)


def find_callees(node: ModuleNode) -> list[ModuleNode]:
    """Return the modules that a module calls: its children, and those of its containers."""
    found: list[ModuleNode] = []
    for child in node.children:
        found += find_callees(child) if child.is_container else [child]
    return found


def balance(costs: Sequence[StageCost]) -> float:
    """Return the greatest cost of a stage divided by the mean; 1 is perfect."""
    total = sum(cost.cost for cost in costs)
    if not total:
        return 1.0
    greatest = max(cost.cost for cost in costs)
    return greatest * len(costs) / total
