"""Entry points of this project that PyTorch finds when a rank imports it: folders on its search path.

A rank also finds ``torch.sagemaker``, even if a ``sitecustomize`` of the user hides the one that would see to that.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import MutableMapping
from pathlib import Path

from smp_config.machine import emulation
from smp_launch.sagemaker.environment import emulates_cuda

_HERE = Path(__file__).parents[1]

#: Holds the entry point by which PyTorch registers the backend ``smddp`` when it is imported.
_DISCOVERY = _HERE / "discovery"

#: The same for the emulation of CUDA.
_EMULATION = _HERE / "discovery_emulation"

#: The same for what other libraries need in a job of the model parallel library.
_LIBRARIES = _HERE / "discovery_libraries"


def make_findable(environ: MutableMapping[str, str], folder: Path | None, *, smddp: bool, libraries: bool) -> None:
    """Let this process, and those that it starts, find what belongs to the job.

    Args:
        environ: of the rank; its ``PYTHONPATH`` gets the folders, so that the script's own processes find them, too.
        folder: of the user's files, None where these have no place of their own.
        smddp: whether the backend of that name is registered.
        libraries: whether other libraries are adapted, in this process only: one that the script starts is no rank.
    """
    importlib.import_module("torch_sagemaker_finder")
    discovered = [_DISCOVERY] if smddp else []
    if emulates_cuda(environ):
        discovered.append(_EMULATION)
    elif emulation.is_asked_for(environ):
        environ[emulation.VARIABLE] = "0"
    folders = [str(folder) if folder else "", environ.get("PYTHONPATH", ""), *map(str, discovered)]
    sys.path += map(str, discovered)
    if libraries:
        sys.path.append(str(_LIBRARIES))
    environ["PYTHONPATH"] = os.pathsep.join(filter(None, folders))
