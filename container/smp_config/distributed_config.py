"""``ModelParallel`` of SDK v3: the content of ``SM_DISTRIBUTED_CONFIG``, and the equivalent distribution."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

#: Fields of ``ModelParallel``, with the defaults of those that may be left out.
FIELDS: Mapping[str, Any] = {
    "parameters": {},
    "processes_per_host": None,
    "custom_mpi_options": "",
    "ship_runtime": True,
    "version": 1,
}


def as_distribution(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the equivalent ``distribution`` of SDK v2.

    Args:
        config: the fields of ``ModelParallel``; a missing field has its default.
    """
    given = {**FIELDS, **config}
    model_parallel = {"enabled": True, "parameters": given["parameters"]}
    if given["version"] == 2:
        torchrun: dict[str, Any] = {"enabled": True}
        if given["processes_per_host"] is not None:
            torchrun["processes_per_host"] = given["processes_per_host"]
        return {"smdistributed": {"modelparallel": model_parallel}, "torch_distributed": torchrun}
    mpi: dict[str, Any] = {"enabled": True}
    if given["processes_per_host"] is not None:
        mpi["processes_per_host"] = given["processes_per_host"]
    if given["custom_mpi_options"]:
        mpi["custom_mpi_options"] = given["custom_mpi_options"]
    return {"smdistributed": {"modelparallel": model_parallel}, "mpi": mpi}
