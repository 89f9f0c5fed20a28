"""The catalogue of GPU instances: what a training job can count on, per instance type.

The facts stand in ``data/instances.json`` and come from the public tables of EC2 accelerated computing instances.
``gpu_memory_mib`` is what EC2's DescribeInstanceTypes reports for one GPU; the driver keeps 1–2 % of it for itself.
``network_gbps`` is null where no number is published. ``rdma`` (GPUDirect RDMA over EFA) is false where the public
tables are silent.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import lru_cache
from importlib import resources

MIB = 2**20
GIB = 2**30


@dataclass(frozen=True)
class Instance:
    """One instance type.

    Attributes:
        name: as SageMaker writes it, ``"ml.p4d.24xlarge"``.
        gpus: GPUs of one instance.
        gpu_memory_bytes: of one GPU, in bytes.
        network_gbps: network bandwidth of the instance in Gbit/s (10^9 bits), or None where none is published.
        network_burst: the bandwidth is an upper limit ("up to"), not sustained.
        efa: has an Elastic Fabric Adapter.
        rdma: GPUs read each other's memory over EFA without the CPU (GPUDirect RDMA).
        nvlink: the GPUs of one instance are joined by NVLink.
        host_memory_bytes: memory of the instance itself, in bytes.
    """

    name: str
    gpus: int
    gpu: str
    gpu_memory_bytes: int
    network_gbps: float | None
    network_burst: bool
    efa: bool
    rdma: bool
    nvlink: bool
    host_memory_bytes: int


@lru_cache(maxsize=1)
def _catalogue() -> dict[str, Instance]:
    text = resources.files("smp_config").joinpath("data", "instances.json").read_text(encoding="utf-8")
    return {
        name: Instance(
            name=name,
            gpu_memory_bytes=row.pop("gpu_memory_mib") * MIB,
            host_memory_bytes=row.pop("host_memory_gib") * GIB,
            **row,
        )
        for name, row in json.loads(text).items()
    }


def instance(name: str) -> Instance | None:
    """The instance type of this name, with or without ``ml.``; None when the catalogue lacks it (callers warn)."""
    if not isinstance(name, str):
        return None
    return _catalogue().get(name if name.startswith("ml.") else f"ml.{name}")


def instances() -> list[Instance]:
    """Every instance type with GPUs that is known, ordered by name."""
    return sorted(_catalogue().values(), key=lambda known: known.name)


__all__ = ["GIB", "MIB", "Instance", "instance", "instances"]
