"""A job from a strategy's view: this rank's place among the others, and its connections to them."""

from __future__ import annotations

import contextlib
import json
import os
import threading
import types
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeVar, cast

from smp_config import ConfigError, Group, Topology
from smp_config.machine.collective_backends import HOST_BACKEND
from smp_config.machine.launchers import is_process_mode
from smp_config.machine.shared_gpu import NCCL, VARIABLE, read_shared_gpu
from smp_records.rank_record import FORWARD, current_record
from smp_runtime.comm.authentication import machine_id
from smp_runtime.comm.collective_log import LoggedCollectives
from smp_runtime.comm.control import Arrival, ControlPlane, host_name
from smp_runtime.comm.devices import (
    assign_gpus,
    choose_backend,
    choose_host_collectives,
    let_nccl_share,
    refuse_unusable_gpus,
    sharing_ranks,
    sharing_warning,
    use_device,
    visible_gpus,
)
from smp_runtime.comm.groups import ProcessGroups
from smp_runtime.comm.host.collectives import HostCollectives, host_of
from smp_runtime.job.backend_implementations import implementation_of
from smp_runtime.parameters.pending_gather import PendingGathers

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist

    from smp_config import ModelParallelParameters
    from smp_runtime.comm.collectives import Collectives

#: Variable in which the launcher and the training toolkit leave ``mp_parameters``.
PARAMETERS_VARIABLE = "SM_HP_MP_PARAMETERS"

#: Variable in which they leave the type of the instance that a rank runs on.
INSTANCE_VARIABLE = "SM_CURRENT_INSTANCE_TYPE"

T = TypeVar("T")


class StepWatch(Protocol):
    """An observer of a step that runs its microbatches one after the other; see ``SMP_TIMELINE``."""

    def turn_to(self, microbatch: int | None) -> None:
        """Note that another microbatch begins; None means that the last one has ended."""

    def backward(self) -> contextlib.AbstractContextManager[None]:
        """Run the backward pass of the microbatch in the block."""

    def close(self) -> None:
        """Stop observing."""


class StepState:
    """State of the running step, for the strategies.

    The step, a pipeline's tasks and ``model.backward`` set it.

    Args:
        has_threads: whether microbatches run on threads of their own, several at once, as tasks of a pipeline do.
            Otherwise the rank runs one microbatch at a time: autograd runs the hooks of a GPU's backward pass on
            its own thread.

    Attributes:
        seed_scale: factor by which the running backward pass has multiplied its losses.
        is_in_forward: whether a forward pass runs outside of a step.
        is_tracing: whether the running step only traces the model, to partition it.
        count: number of steps that have ended.
        watch: observer of microbatches without a pipeline, or None.
        leave: changes what a microbatch has returned, before the script gets it.
    """

    def __init__(self, *, has_threads: bool) -> None:
        self.seed_scale = 1.0
        self.is_in_forward = False
        self.is_tracing = False
        self.count = 0
        self.watch: StepWatch | None = None
        self.leave: Callable[[Any], Any] = lambda result: result
        self.use_threads(has_threads)

    def use_threads(self, has_threads: bool) -> None:
        """Switch between microbatches on threads of their own and microbatches on one thread."""
        # Microbatches on several threads run in turns, and each thread has its own running microbatch.
        self._here: Any = threading.local() if has_threads else types.SimpleNamespace()

    @property
    def microbatch(self) -> int | None:
        """Return the running microbatch, or None outside a step.

        With pipeline parallelism, it is the one that runs on the calling thread.
        """
        return getattr(self._here, "microbatch", None)

    @microbatch.setter
    def microbatch(self, value: int | None) -> None:
        self._here.microbatch = value
        if self.watch is not None:
            self.watch.turn_to(value)
        if value is not None:
            current_record().enter(FORWARD, value)


@dataclass(eq=False)
class Ranks:
    """The place of a rank in its job; only :meth:`regroup` changes it."""

    cfg: ModelParallelParameters  # the typed configuration, the same on all ranks
    topology: Topology  # all groups
    rank: int  # global position
    local_rank: int  # position among the ranks with the same announced host name
    local_size: int  # their number
    device: torch.device  # this rank computes on it
    backend: str  # of the process groups
    control: ControlPlane  # carries small Python objects between ranks
    groups: ProcessGroups  # carry tensors
    collectives: Collectives  # the strategies communicate through these
    step: StepState  # the part of a step that runs on this rank now
    _kept: dict[object, Any] = field(default_factory=dict, repr=False)

    @classmethod
    def join(
        cls, parameters: ModelParallelParameters, control: ControlPlane, collectives: Collectives | None = None
    ) -> tuple[Ranks, str | None]:
        """Agree with the other ranks and build every group; all ranks call it.

        Args:
            collectives: the collectives of the strategies; None for those of the backend.

        Returns:
            This rank's place, and a warning about ranks that share a GPU, if there are any.

        Raises:
            ConfigError: the ranks were configured differently, or their number does not fit.
        """
        topology = parameters.topology(control.size)
        if collectives is None:  # else the ranks and their devices are simulated
            refuse_unusable_gpus(os.environ)
        agreed = _agree(control, parameters)
        neighbours, gpus = agreed.neighbours, agreed.gpus
        device = use_device(assign_gpus(gpus)[control.rank])
        backend = choose_backend(parameters, device, agreed.hosts, agreed.instance_type, gpus, agreed.shared_gpu)
        if agreed.shared_gpu == NCCL and backend != HOST_BACKEND and sharing_ranks(gpus):
            let_nccl_share(control.rank, control.allgather(machine_id(), list(range(control.size))))
        implementation = implementation_of(backend)
        if implementation.register is not None:
            implementation.register()
        groups = ProcessGroups(control, topology, backend, parameters.ddp_port, device)
        if collectives is None:
            collectives = implementation.collectives()
            shares = choose_host_collectives(parameters, device, backend, process_mode=agreed.process_mode)
            host = None
            if shares:
                host = host_of(control, neighbours, is_required=parameters.host_collectives is True)
            if host is not None:
                collectives = HostCollectives(host)
                groups.at_end(collectives.close)
        ranks = cls(
            cfg=parameters,
            topology=topology,
            rank=control.rank,
            local_rank=neighbours.index(control.rank),
            local_size=len(neighbours),
            device=device,
            backend=backend,
            control=control,
            groups=groups,
            collectives=_watched(collectives),
            step=StepState(has_threads=topology.size(Group.PP) > 1),
        )
        return ranks, sharing_warning(parameters, device, gpus, agreed.shared_gpu)

    def size(self, group: Group) -> int:
        """Return the number of ranks in this rank's group of that kind."""
        return self.topology.size(group)

    def rank_in(self, group: Group) -> int:
        """Return this rank's position in its group of that kind."""
        return self.topology.rank_in(group, self.rank)

    def members(self, group: Group) -> list[int]:
        """Return the global ranks of this rank's group of that kind."""
        return self.topology.group_of(group, self.rank)

    def process_group(self, group: Group) -> dist.ProcessGroup:
        """Return this rank's process group of that kind."""
        return self.groups.group(group)

    def keep(self, kind: type[T], make: Callable[[], T]) -> T:
        """Return the object that a package keeps once per job; create it on the first call."""
        if kind not in self._kept:
            self._kept[kind] = make()
        return cast("T", self._kept[kind])

    def regroup(self, parameters: ModelParallelParameters) -> None:
        """Change this rank's place to that of other parallel degrees; all ranks call it, between two steps.

        All holders of this record see the change. Objects made by :meth:`keep` are dropped, since most of them belong to
        groups. Kinds with ``outlives_regrouping = True`` are kept.

        Raises:
            ConfigError: the number of ranks does not fit.
        """
        if (arrivals := self.kept(PendingGathers)) is not None:
            arrivals.settle()
        self.topology = parameters.topology(self.control.size)
        self.cfg = parameters
        self.groups.slice_by(self.topology)
        self.step.use_threads(self.size(Group.PP) > 1)
        for kind in [kind for kind in self._kept if not getattr(kind, "outlives_regrouping", False)]:
            del self._kept[kind]

    def forget(self) -> None:
        """Release the objects made by :meth:`keep`, which hold this record, when the rank leaves the job."""
        self._kept.clear()

    def kept(self, kind: type[T]) -> T | None:
        """Return the object that :meth:`keep` has made, or None."""
        return self._kept.get(kind)


def _watched(collectives: Collectives) -> Collectives:
    """Return collectives that log each call if records of this process are kept, else return them unchanged."""
    notes = current_record()
    return LoggedCollectives(collectives, notes) if notes.are_kept else collectives


class AgreedFacts(NamedTuple):
    """Facts about the job that all ranks have agreed on."""

    neighbours: list[int]  # the ranks of this host
    hosts: int
    instance_type: str | None  # if it is the same on all hosts
    gpus: list[list[str]]  # that each rank sees
    process_mode: bool  # whether the job runs in process mode
    shared_gpu: str  # backend of ranks that share a GPU


def _agree(control: ControlPlane, parameters: ModelParallelParameters) -> AgreedFacts:
    """Check that all ranks read one configuration, and exchange what else they must know of each other.

    Ranks are on one host if their launchers announced the same host name. So several hosts simulated on one machine
    count as several, although their ranks see the same GPUs.

    Raises:
        ConfigError: the ranks were configured differently.
    """
    settings = json.dumps(parameters.to_mp_parameters(), sort_keys=True)
    process_mode = is_process_mode(os.environ, control.rank, control.size)
    instance, shared = os.environ.get(INSTANCE_VARIABLE), read_shared_gpu(os.environ)
    mine = Arrival(host_name(), settings, instance, visible_gpus(), process_mode, shared)
    everyone = control.arrivals(mine)
    for rank, one in enumerate(everyone):
        if one.settings != everyone[0].settings:
            raise ConfigError(
                f"rank {rank} was configured with {one.settings}, but rank 0 with {everyone[0].settings}; every rank must read "
                f"the same configuration: check what each passes to the init function and its {PARAMETERS_VARIABLE}",
                code="SMP303",
            )
        if one.shared_gpu != everyone[0].shared_gpu:
            raise ConfigError(
                f"{VARIABLE} is {one.shared_gpu} on rank {rank}, but {everyone[0].shared_gpu} on rank 0; set it to the same on "
                "all ranks",
                code="SMP303",
            )
    host = everyone[control.rank].host
    # None if hosts have different types: each rank would choose a backend for its own type, and not all the same.
    instances = {one.instance for one in everyone}
    return AgreedFacts(
        neighbours=[rank for rank, one in enumerate(everyone) if one.host == host],
        hosts=len({one.host for one in everyone}),
        instance_type=instances.pop() if len(instances) == 1 else None,
        gpus=[one.gpus for one in everyone],
        process_mode=all(one.process_mode for one in everyone),
        shared_gpu=shared,
    )
