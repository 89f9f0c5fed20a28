"""The numbers of a plan: memory, batches and traffic that a request leads to, and whether it fits."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from smp_config.machine.instances import Instance, instance
from smp_estimator.planning.batches import Batches, Epochs, batches_of
from smp_estimator.planning.memory.device_memory import memory
from smp_estimator.planning.memory.host_memory import checkpoint_bytes
from smp_estimator.planning.memory.kinds import Kind
from smp_estimator.planning.network import Traffic, traffic
from smp_estimator.planning.step_time import StepCost, StepTime, Training, idle_of, step_cost, step_time
from smp_estimator.planning.timing.goodput import Goodput, JobFailures, goodput

if TYPE_CHECKING:
    from typing_extensions import Self

    from smp_config import Group, Topology
    from smp_estimator.planning.memory.kinds import StageMemory
    from smp_estimator.planning.request import Request

#: Above this part of a GPU's memory a plan is tight: the driver's own use, NCCL's buffers for collectives, kernel workspaces
#: and the allocator's fragmentation are not counted in a plan.
TIGHT_ABOVE = 0.85


class Verdict(enum.Enum):
    """Whether a plan fits into the device's memory."""

    FITS = "fits"
    TIGHT = "tight"
    DOES_NOT_FIT = "does not fit"
    UNKNOWN = "unknown (the memory of the device is not known)"

    @property
    def feasible(self) -> bool:
        """Return whether the plan fits, even if tightly."""
        return self in (Verdict.FITS, Verdict.TIGHT)


@dataclass(frozen=True)
class Forecast:
    """The memory, batches and traffic that a request leads to.

    Attributes:
        topology: the degrees over all processes.
        stages: memory of a GPU in each pipeline stage.
        traffic: lower bound of the bytes that a rank of the fullest stage sends in one optimizer step.
    """

    request: Request
    topology: Topology
    batches: Batches
    stages: tuple[StageMemory, ...]
    traffic: Traffic

    @classmethod
    def of(cls, request: Request) -> Self:
        """Compute the forecast of a request.

        Raises:
            ConfigError: the degrees do not fit the processes, or the microbatches do not divide the batch.
        """
        parameters, workload = request.parameters, request.workload
        topology = parameters.topology(request.world)
        batch = batches_of(
            parameters,
            request.world,
            workload.batch,
            sequence=request.shape.sequence,
            accumulation=workload.accumulation,
        )
        stages = memory(request, topology, batch)
        sent = traffic(request, topology, batch, max(stages, key=lambda stage: stage.total))
        return cls(request, topology, batch, tuple(stages), sent)

    def changed(self, settings: Mapping[str, Any] | None = None, **fields: Any) -> Self:
        """Return the forecast with other settings of mp_parameters or keywords of ``plan()``.

        Raises:
            ConfigError: the degrees no longer fit.
        """
        return self.of(self.request.changed(settings, **fields))

    @property
    def epochs(self) -> Epochs | None:
        """Return the steps of the data set; None if its size was not given."""
        script = self.request.workload
        if script.samples is None and script.tokens is None:
            return None
        return Epochs.of(self.batches, script.samples, script.tokens, script.epochs)

    @property
    def worst(self) -> StageMemory:
        """Return the stage that needs the most memory."""
        return max(self.stages, key=lambda stage: stage.total)

    @property
    def total_bytes(self) -> int:
        """Return the bytes on the fullest GPU."""
        return self.worst.total

    @property
    def fraction(self) -> float | None:
        """Return the part of the device's memory that the plan uses; None if that memory is unknown."""
        size = self.request.gpu_memory_bytes
        return self.worst.total / size if size else None

    @property
    def verdict(self) -> Verdict:
        """Return whether the plan fits, is tight (above 85 % of the device's memory), or does not fit."""
        fraction = self.fraction
        if fraction is None:
            return Verdict.UNKNOWN
        if fraction > 1:
            return Verdict.DOES_NOT_FIT
        return Verdict.TIGHT if fraction > TIGHT_ABOVE else Verdict.FITS

    @property
    def idle(self) -> float:
        """Return the part of a step that a pipeline stage waits."""
        return idle_of(self.request)

    @cached_property
    def time(self) -> StepTime | None:
        """Return the estimated seconds of a step, even if a measured time was given; None if a fact is unknown."""
        return step_time(self.request, self.topology, self.batches, self.traffic)

    @property
    def step_seconds(self) -> float | None:
        """Return the seconds of a step: the given time, else :attr:`time`; None without both."""
        given = self.request.workload.step_seconds
        if given is not None:
            return given
        return None if self.time is None else self.time.total

    @property
    def cost(self) -> StepCost | None:
        """Return the cost of a step; None without a time, or without a price."""
        return step_cost(self.request, self.step_seconds, self.batches.tokens)

    @property
    def training(self) -> Training | None:
        """Return the time and price of all steps; None if their number or their time is not known."""
        script, epochs, seconds = self.request.workload, self.epochs, self.step_seconds
        # A script may train for a number of steps, whatever the size of its data set.
        steps = script.steps
        if not steps and epochs is not None:
            steps = epochs.total_steps
        if not steps or seconds is None:
            return None
        passes = None
        if epochs is not None and epochs.steps:
            passes = steps / epochs.steps
        each = None if self.cost is None else self.cost.usd_per_step
        is_given = script.step_seconds is not None
        return Training(steps, passes, seconds, is_given, each)

    @property
    def failures(self) -> JobFailures:
        """Return how often the job fails, and what its checkpoints and restarts take."""
        script = self.request.workload
        return JobFailures.of_job(
            self.request.world,
            self.worst.state - self.worst.kinds[Kind.GRADIENTS],
            rate=script.failures_per_gpu_hour,
            interval=script.save_interval,
            restart=script.restart_seconds,
        )

    @cached_property
    def goodput(self) -> Goodput | None:
        """Return the hours and the price of all steps with failures; None if their number or their time is not known."""
        training, cost = self.training, self.cost
        if training is None:
            return None
        price = None if cost is None else cost.usd_per_hour * cost.instance_count
        of_step = None if self.time is None or training.is_given else self.time.uncertainty
        return goodput(training.seconds, self.failures, usd_per_hour=price, uncertainty=of_step or 0.0)

    @property
    def instance(self) -> Instance | None:
        """Return the instance; None if the catalogue does not have it."""
        return instance(self.request.instance_type)

    @cached_property
    def memory_checkpoint_bytes(self) -> int:
        """Return the shared memory for memory checkpoints on the fullest host; 0 if the job keeps none."""
        return checkpoint_bytes(self.request, self.topology)

    @property
    def offloaded_host_bytes(self) -> int:
        """Return the bytes of offloaded activations in the memory of one host."""
        return self.worst.activations.offloaded * self.request.processes_per_host

    def nodes_of(self, group: Group) -> int:
        """Return the most nodes that one group of this kind spans, with consecutive ranks on a node."""
        per_node = self.request.processes_per_host
        return max(len({rank // per_node for rank in members}) for members in self.topology.groups(group))
