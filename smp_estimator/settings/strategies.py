"""``distribution`` with completion: :class:`ModelParallel` and :class:`MPI` are parts of it, joined by ``|``.

Editors and type checkers read ``strategies.pyi`` beside this file. Its arguments and words are those of
``smp_config.parameters``; ``python tests/support/documents/stubs.py`` writes it.
"""

from __future__ import annotations

import inspect
from typing import Any, get_type_hints

from smp_config import ConfigError, JobSettings, ModelParallelParameters
from smp_config.mpi_options import check_mpi_options
from smp_estimator.settings.variables import is_variable

_FIELDS = ModelParallelParameters.model_fields


class ModelParallel(dict[str, Any]):
    """The part of ``distribution`` that turns the model parallel library on, with its parameters, checked.

    A dictionary like the one that is written by hand, which stays valid.

    Example:
        >>> distribution = ModelParallel(ddp=True, microbatches=4) | MPI(processes_per_host=8)

    Raises:
        ConfigError: an unknown parameter, a value out of its bounds, parameters that exclude each other.
    """

    def __init__(self, **parameters: Any) -> None:
        given = {}
        for name, value in parameters.items():
            field = _FIELDS.get(name)
            alias = None if field is None else field.alias
            given[alias or name] = value
        ModelParallelParameters.from_mp_parameters(given)
        super().__init__(smdistributed={"modelparallel": {"enabled": True, "parameters": given}})


class MPI(dict[str, Any]):
    """The part of ``distribution`` that sets how many processes ``mpirun`` starts.

    Args:
        processes_per_host: of each host; on GPU instances at most one per GPU. None means one on this machine, and is
            refused in the cloud.
        custom_mpi_options: options for ``mpirun`` as one line, such as ``"-x NCCL_DEBUG=INFO"``.

    Raises:
        ConfigError: no number of processes, or options that contradict each other or the job's own settings.
    """

    def __init__(self, processes_per_host: int | None = None, custom_mpi_options: str = "") -> None:
        given = {"processes_per_host": processes_per_host, "custom_mpi_options": custom_mpi_options}
        given = {name: value for name, value in given.items() if value is not None and value != ""}
        known = {name: value for name, value in given.items() if not is_variable(value)}
        mpi = JobSettings.from_distribution({"mpi": {"enabled": True, **known}}).mpi
        if mpi is not None and mpi.processes_per_host is not None and mpi.processes_per_host < 1:
            raise ConfigError(
                f"processes_per_host is {processes_per_host}; it is the number of processes that each host starts: set it to 1 "
                "or more",
                code="SMP101",
            )
        check_mpi_options(known.get("custom_mpi_options", ""))
        super().__init__(mpi={"enabled": True, **given})


def _show_parameters() -> None:
    """Let ``help()`` and notebooks list the parameters with their types, defaults and meaning."""
    types = get_type_hints(ModelParallelParameters)
    own = inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)
    listed = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=field.default, annotation=types[name])
        for name, field in _FIELDS.items()
    ]
    vars(ModelParallel)["__init__"].__signature__ = inspect.Signature([own, *listed])
    lines = "".join(f"    {name}: {field.description}\n" for name, field in _FIELDS.items())
    # From Python 3.13 on the compiler takes the indentation away.
    ModelParallel.__doc__ = inspect.cleandoc(str(ModelParallel.__doc__)).replace(
        "Example:", f"Args:\n{lines}\nExample:"
    )


_show_parameters()
