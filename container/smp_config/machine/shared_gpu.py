"""The variable that selects how ranks exchange tensors if several of them share one GPU."""

from __future__ import annotations

from collections.abc import Mapping

from smp_config.errors import ConfigError, show_value
from smp_config.machine.collective_backends import GLOO, NCCL

#: ``nccl``: NCCL, for tests of the paths that only NCCL takes. ``gloo``, or unset: gloo, through host memory.
VARIABLE = "SMP_SHARED_GPU"


def read_shared_gpu(environ: Mapping[str, str]) -> str:
    """Return the backend of ranks that share a GPU, ``"gloo"`` or ``"nccl"``.

    Raises:
        ConfigError: the variable has another value.
    """
    text = environ.get(VARIABLE, "") or GLOO
    if text not in (GLOO, NCCL):
        raise ConfigError(
            f"{VARIABLE} is {show_value(text)}; it selects how ranks that share a GPU exchange tensors: set {GLOO} (the default), "
            f"or {NCCL} for tests",
            code="SMP106",
        )
    return text
