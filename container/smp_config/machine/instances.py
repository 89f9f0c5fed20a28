"""The catalogue of GPU instances: what a training job can count on, per instance type.

The facts stand in ``data/instances.json`` and come from the public tables of EC2 accelerated computing instances; each
row names its source there, with the date. ``gpu_memory_mib`` is what EC2's DescribeInstanceTypes reports for one GPU; the
driver keeps 1–2 % of it for itself. ``network_gbps`` is null where no number is published. ``rdma`` (GPUDirect RDMA over
EFA) is false where the public tables are silent. Prices, in ``data/prices.json``, are those of EC2: SageMaker bills a
rate of its own for each ``ml.`` type, so they are for comparing types with one another.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import lru_cache
from importlib import resources
from typing import Any

from smp_config.errors import ConfigError
from smp_config.machine.gpus import Gpu, gpu

#: Units of memory.
MIB = 2**20
GIB = 2**30

#: The oldest compute capability for which a PyTorch that the runtime works with has code.
_OLDEST_CAPABILITY = (5, 0)


@dataclass(frozen=True)
class Instance:
    """One instance type.

    Attributes:
        name: as SageMaker writes it, ``"ml.p4d.24xlarge"``.
        gpus: GPUs of one instance.
        gpu_memory_bytes: of one GPU, in bytes.
        memory_gb_per_s: bandwidth of one GPU's memory, in 10^9 bytes per second; None where none is published.
        network_gbps: network bandwidth of the instance in Gbit/s (10^9 bits), or None where none is published.
        network_baseline_gbps: what of it is sustained; less than ``network_gbps`` where that is an upper limit.
        network_burst: ``network_gbps`` is an upper limit ("up to"), not sustained.
        efa: has an Elastic Fabric Adapter.
        rdma: GPUs read each other's memory over EFA without the CPU (GPUDirect RDMA).
        nvlink: the GPUs of one instance are joined by NVLink.
        host_memory_bytes: memory of the instance itself, in bytes.
        usd_per_hour: what EC2 bills for the type without ``ml.``, on demand (:func:`price_source`); None where none is known.
        source: of the row, with its date.
    """

    name: str
    gpus: int
    gpu: str
    gpu_memory_bytes: int
    memory_gb_per_s: float | None
    network_gbps: float | None
    network_baseline_gbps: float | None
    network_burst: bool
    efa: bool
    rdma: bool
    nvlink: bool
    host_memory_bytes: int
    usd_per_hour: float | None
    source: str

    @property
    def gpu_facts(self) -> Gpu:
        """Return the performance data of one of its GPUs."""
        return gpu(self.gpu)

    @property
    def link_gb_per_s(self) -> float:
        """Return a GPU's bandwidth to the others of the instance, one direction, in 10^9 bytes per second."""
        facts = self.gpu_facts
        return (facts.nvlink_gb_per_s if self.nvlink else None) or facts.pcie_gb_per_s


def _data(name: str) -> Any:
    return json.loads(resources.files("smp_config").joinpath("data").joinpath(name).read_text(encoding="utf-8"))


@lru_cache(maxsize=1)
def _catalogue() -> dict[str, Instance]:
    data, prices = _data("instances.json"), _data("prices.json")["usd_per_hour"]
    sources = {name: f"{source['what']}, {source['date']}" for name, source in data["sources"].items()}
    return {
        name: Instance(
            name=name,
            gpu_memory_bytes=row.pop("gpu_memory_mib") * MIB,
            # A type has its own bandwidth if its GPUs differ from the model in the catalogue of GPUs.
            memory_gb_per_s=row.pop("memory_gb_per_s", gpu(row["gpu"]).memory_gb_per_s),
            host_memory_bytes=row.pop("host_memory_gib") * GIB,
            usd_per_hour=prices[name],
            source=sources[row.pop("source")],
            **row,
        )
        for name, row in data["instances"].items()
    }


def price_source() -> str:
    """Return the source of :attr:`Instance.usd_per_hour`: the kind of price, the region, and the table's date."""
    source = _data("prices.json")["source"]
    return f"{source['what'].split(', as ')[0]}, {source['region']}, {source['date']}"


def instance(name: str) -> Instance | None:
    """Return the instance type of this name, with or without ``ml.``.

    Returns:
        None if the catalogue lacks it (callers warn).
    """
    if not isinstance(name, str):
        return None
    return _catalogue().get(name if name.startswith("ml.") else f"ml.{name}")


def require_usable(
    name: str | None, processes_per_host: int | None = None, setting: str = "mpi.processes_per_host"
) -> Instance | None:
    """Check the instance type of a model parallel job, and return it if the catalogue has it.

    Args:
        processes_per_host: each needs its own GPU; None is not checked, nor are instances without GPUs.
        setting: what gives that number, for the message.

    Raises:
        ConfigError: accelerators that the library does not run on, or fewer GPUs than processes.
    """
    if not isinstance(name, str) or not name.startswith("ml."):
        return None
    refuse_neuron(name)
    known = instance(name)
    if known is None:
        return None
    facts = known.gpu_facts
    if facts.capability < _OLDEST_CAPABILITY:
        raise ConfigError(
            f"instance_type is {name}, whose {known.gpu} GPUs have compute capability {facts.compute_capability}; the model "
            "parallel library needs PyTorch 2.4 or newer, which runs from 5.0 on: use a g4dn or g5 instance, or p3 and newer, for "
            "example 'ml.g5.12xlarge'",
            code="SMP105",
        )
    if processes_per_host is not None and processes_per_host > known.gpus:
        raise ConfigError(
            f"{setting} is {processes_per_host}, but {known.name} has {known.gpus} GPUs and each process needs "
            f"its own; set processes_per_host to at most {known.gpus}",
            code="SMP105",
        )
    return known


def refuse_neuron(name: str) -> None:
    """Refuse an instance type, with or without ``ml.``, that computes on AWS Neuron devices.

    Raises:
        ConfigError: one of the families trn and inf.
    """
    if name.removeprefix("ml.").startswith(("trn", "inf")):
        raise ConfigError(
            f"instance_type is {name}, whose accelerators are AWS Neuron devices; the model parallel library "
            "computes on NVIDIA GPUs or CPUs: use a p or g instance, for example 'ml.p4d.24xlarge'",
            code="SMP105",
        )


def has_gpus(name: str | None) -> bool | None:
    """Return whether an instance type of the cloud has GPUs.

    Returns:
        None if the catalogue lacks the type but its family may have GPUs.
    """
    if not isinstance(name, str) or not name.startswith("ml."):
        return None
    if instance(name) is not None:
        return True
    family = name.split(".")[1]
    # The catalogue has no types of these families that came after it.
    may_have_some = family.startswith(("p", "g", "trn", "inf"))
    return None if may_have_some else False


def instances() -> list[Instance]:
    """Return every known instance type with GPUs, ordered by name."""
    return sorted(_catalogue().values(), key=lambda known: known.name)


__all__ = [
    "GIB",
    "MIB",
    "Instance",
    "has_gpus",
    "instance",
    "instances",
    "price_source",
    "refuse_neuron",
    "require_usable",
]
