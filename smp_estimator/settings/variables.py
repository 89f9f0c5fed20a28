"""Pipeline variables inside a distribution: values that are only known when a pipeline runs."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from typing import Any

from smp_config import ConfigError
from smp_config.job import MP_PARAMETERS, MPI_OPTIONS, MPI_PROCESSES

#: Settings that travel as a hyperparameter of their own, which a pipeline can fill in.
_CARRIERS = {
    ("mpi", "processes_per_host"): MPI_PROCESSES,
    ("mpi", "custom_mpi_options"): MPI_OPTIONS,
    ("smdistributed", "modelparallel", "parameters"): MP_PARAMETERS,
}


def is_variable(value: Any) -> bool:
    """Return whether ``value`` is a pipeline variable; always False if the SDK was never imported."""
    if "sagemaker.workflow" in sys.modules:
        from smp_estimator.sdk.version_2 import is_pipeline_variable

        return bool(is_pipeline_variable(value))
    of_version_3 = sys.modules.get("sagemaker.core.helper.pipeline_variable")
    return of_version_3 is not None and isinstance(value, of_version_3.PipelineVariable)


def separate(distribution: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Split a distribution into the part that can be checked now and the part that a pipeline fills in.

    Returns:
        The distribution without variables, and the variables by the hyperparameter that carries each.

    Raises:
        ConfigError: a variable where the value is needed now.
    """
    later: dict[str, Any] = {}
    for path, value in _found(distribution, ()):
        if path not in _CARRIERS:
            where = "".join(f"[{part!r}]" for part in path)
            inside = path[:3] == ("smdistributed", "modelparallel", "parameters")
            reason = "its value decides what is sent"
            if inside:
                reason = "all parameters travel as one JSON text, which is written now"
            ways = ", ".join("[" + "][".join(map(repr, known)) + "]" for known in _CARRIERS)
            raise ConfigError(
                f"distribution{where} is the pipeline variable {_name(value)}; {reason}, before the pipeline runs: give "
                f"a plain value there (a variable may stand at {ways}, and in hyperparameters)",
                code="SMP106",
            )
        later[_CARRIERS[path]] = value
    return (_without(distribution) if later else dict(distribution)), later


def _found(value: Any, path: tuple[Any, ...]) -> Iterator[tuple[tuple[Any, ...], Any]]:
    if is_variable(value):
        yield path, value
        return
    if not isinstance(value, Mapping):
        return
    for key, inner in value.items():
        if key != "instance_groups":
            yield from _found(inner, (*path, key))


def _without(value: Mapping[str, Any]) -> dict[str, Any]:
    return {
        key: _without(inner) if isinstance(inner, Mapping) else inner
        for key, inner in value.items()
        if not is_variable(inner)
    }


def _name(value: Any) -> str:
    return f"{type(value).__name__} {getattr(value, 'name', '')!s}".strip()
