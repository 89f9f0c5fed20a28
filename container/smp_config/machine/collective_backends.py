"""The backends of collectives, as a record of traits for each; settings, planning and the runtime use them.

A new backend is a record here, and its implementation in :mod:`smp_runtime.job.backend_implementations`. A backend that PyTorch
knows, and through which stages of a pipeline do not send, needs only the record.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal, Protocol

#: What ``ddp_dist_backend`` may be.
Backend = Literal["auto", "nccl", "smddp", "gloo"]

#: Leaves the choice to the job.
AUTOMATIC: Backend = "auto"
GLOO, NCCL, SMDDP = "gloo", "nccl", "smddp"

#: Tensors in host memory go over it in every job, so that collectives of objects work beside those of GPUs.
HOST_BACKEND = GLOO

#: The instance on which the documentation has SMDDP chosen.
SMDDP_INSTANCE = "ml.p4d.24xlarge"


class RequestedDegrees(Protocol):
    """The parameters of a job by which ``auto`` chooses."""

    @property
    def ddp_dist_backend(self) -> str:
        """Return the backend that the job asks for."""

    @property
    def sharded_data_parallel_degree(self) -> int:
        """Return over how many ranks parameters are sharded."""

    @property
    def tensor_parallel_degree(self) -> int:
        """Return over how many ranks tensors are split."""


#: ``rule(parameters, hosts, instance_type)``.
AutomaticRule = Callable[[RequestedDegrees, int, "str | None"], bool]


def _never(parameters: RequestedDegrees, hosts: int, instance_type: str | None) -> bool:
    return False


def _has_documented_layout(parameters: RequestedDegrees, hosts: int, instance_type: str | None) -> bool:
    """Return whether the documentation has SMDDP chosen: several hosts, sharded, no tensor parallelism."""
    is_sharded = parameters.sharded_data_parallel_degree > 1
    has_whole_tensors = parameters.tensor_parallel_degree == 1
    return is_sharded and has_whole_tensors and instance_type == SMDDP_INSTANCE and hosts > 1


@dataclass(frozen=True)
class BackendTraits:
    """What settings, planning and the runtime ask of a backend.

    Attributes:
        chosen: when ``auto`` chooses it, for the documentation of ``ddp_dist_backend``.
        for_gpus: PyTorch's backend for tensors of a GPU; those in host memory go over :data:`HOST_BACKEND`.
        needs_gpu: it cannot be asked for on a CPU.
        is_own: this library brings it, under its own name; a group of any other is made of PyTorch's backends by device.
        is_automatic: whether ``auto`` chooses it before the plain backend of the device.
        order: how the next collective follows one: on the GPU's stream, on a thread, or once the rank has waited.
        sends_messages: its groups carry messages from one rank to another.
        has_phases: its own all-gather goes in phases between and inside hosts.
    """

    chosen: str
    for_gpus: str
    needs_gpu: bool = False
    is_own: bool = False
    is_automatic: AutomaticRule = _never
    order: Literal["stream", "thread", "wait"] = "wait"
    sends_messages: bool = True
    has_phases: bool = False

    @property
    def has_communicators(self) -> bool:
        """Return whether it holds memory of a GPU between its calls, which must be aborted to end early."""
        return self.for_gpus == NCCL

    @property
    def takes_one_rank_per_gpu(self) -> bool:
        """Return whether ranks that share a GPU need another backend."""
        return self.for_gpus != HOST_BACKEND


TRAITS: Mapping[str, BackendTraits] = {
    # The all-gather of the SageMaker data parallel library, beside NCCL or gloo.
    SMDDP: BackendTraits(
        f"smddp if sharded over several {SMDDP_INSTANCE}",
        for_gpus=NCCL,
        is_own=True,
        is_automatic=_has_documented_layout,
        sends_messages=False,
        has_phases=True,
    ),
    NCCL: BackendTraits("nccl on GPUs", for_gpus=NCCL, needs_gpu=True, order="stream"),
    GLOO: BackendTraits("gloo on CPUs", for_gpus=GLOO, order="thread"),
}

#: What ``auto`` takes for a GPU if it chooses no other.
_PLAIN_ON_GPUS = NCCL


def describe() -> str:
    """Return one sentence that describes what ``ddp_dist_backend`` chooses from."""
    return f"Collectives; auto: {', else '.join(traits.chosen for traits in TRAITS.values())}."


def chosen_backend(parameters: RequestedDegrees, hosts: int, instance_type: str | None) -> str:
    """Return the name of the backend that a job asks for, or ``"auto"`` for the plain one of each rank's device.

    Args:
        instance_type: of all hosts; None if they differ or it is unknown.
    """
    if parameters.ddp_dist_backend != AUTOMATIC:
        return parameters.ddp_dist_backend
    for name, traits in TRAITS.items():
        if traits.is_automatic(parameters, hosts, instance_type):
            return name
    return AUTOMATIC


def traits_on_gpus(name: str) -> BackendTraits:
    """Return the traits of a backend of a job on GPUs; ``auto`` is the plain one."""
    return TRAITS[_PLAIN_ON_GPUS if name == AUTOMATIC else name]


def needs_gpu(requested: str) -> bool:
    """Return whether a job that asks for this backend is refused on a CPU."""
    return requested != AUTOMATIC and TRAITS[requested].needs_gpu


def group_backend(name: str, device: str) -> str:
    """Return the string by which PyTorch makes groups of a backend.

    Args:
        name: the result of :func:`chosen_backend`.
        device: ``"cpu"`` or ``"cuda"``, on which the rank computes.
    """
    if device == "cpu":
        is_own = name != AUTOMATIC and TRAITS[name].is_own
        return name if is_own else HOST_BACKEND
    traits = traits_on_gpus(name)
    if traits.is_own:
        return name
    if traits.for_gpus == HOST_BACKEND:
        return HOST_BACKEND
    return f"cpu:{HOST_BACKEND},cuda:{traits.for_gpus}"


def backends_by_device(backends: str) -> dict[str, str]:
    """Return the backend for each kind of device, from a string such as ``"cpu:gloo,cuda:nccl"``."""
    pairs = (pair.partition(":") for pair in backends.split(","))
    return {device: backend for device, _, backend in pairs}


def traits_of_group(backends: str, device: str) -> BackendTraits | None:
    """Return the traits of the backend of groups for tensors of a device; None if it is a script's own.

    Args:
        backends: of :func:`group_backend`, or as PyTorch reports those of a group: ``"gloo"``, ``"cpu:gloo,cuda:nccl"``.
    """
    name = backends_by_device(backends).get(device, "") if ":" in backends else backends
    return TRAITS.get(name)
