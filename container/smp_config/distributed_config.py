"""``ModelParallel`` of SDK v3 as it travels: what ``SM_DISTRIBUTED_CONFIG`` holds, and the distribution that it stands for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

#: Fields of ``ModelParallel``, with the defaults of those that may be left out.
FIELDS: Mapping[str, Any] = {
    "parameters": {},
    "processes_per_host": None,
    "custom_mpi_options": "",
    "ship_runtime": True,
}


def as_distribution(config: Mapping[str, Any]) -> dict[str, Any]:
    """The ``distribution`` of SDK v2 that says the same.

    Args:
        config: the fields of ``ModelParallel``; one that is left out has its default.
    """
    given = {**FIELDS, **config}
    mpi: dict[str, Any] = {"enabled": True}
    if given["processes_per_host"] is not None:
        mpi["processes_per_host"] = given["processes_per_host"]
    if given["custom_mpi_options"]:
        mpi["custom_mpi_options"] = given["custom_mpi_options"]
    model_parallel = {"enabled": True, "parameters": given["parameters"]}
    return {"smdistributed": {"modelparallel": model_parallel}, "mpi": mpi}
