"""Installation of the emulation in place of PyTorch's calls, and its removal."""

from __future__ import annotations

import atexit
import contextlib
import importlib
import os
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch

import smp_emulation
from smp_config.machine import emulation
from smp_emulation import devices
from smp_emulation.covered import (
    accelerator,
    memory,
    ordering,
    precision,
    processes,
    profiling,
    randomness,
    refused,
    tensors,
)
from smp_emulation.covered.bare_numbers import BareNumbers
from smp_emulation.gpu_model import storages

if TYPE_CHECKING:
    from smp_emulation.calls import CoveredCall

#: All that is covered, in the order in which it is put there.
CALLS: tuple[CoveredCall, ...] = (
    *devices.CALLS,
    *memory.CALLS,
    *ordering.CALLS,
    *randomness.CALLS,
    *precision.CALLS,
    *profiling.CALLS,
    *processes.CALLS,
    *accelerator.CALLS,
    *refused.CALLS,
    *tensors.CALLS,
)

#: Other modules that contain the functions of ``torch.cuda`` and its relatives under the same names.
_ALSO_IN = {
    "torch.cuda": (
        "torch.cuda.memory",
        "torch.cuda.random",
        "torch.cuda.streams",
        "torch.cuda.graphs",
    ),
    "torch.cuda.comm": ("torch.nn.parallel.comm",),
    "torch.cuda.graphs": ("torch.cuda",),
    "torch.cuda.green_contexts": ("torch.cuda",),
    "torch.accelerator": ("torch.accelerator.memory",),
    "torch.distributed": ("torch.distributed.distributed_c10d", "torch.distributed.device_mesh"),
    "torch.amp": ("torch.amp.autocast_mode",),
    "torch.cuda.amp.common": ("torch.amp.grad_scaler", "torch.cuda.amp", "torch.cuda.amp.autocast_mode"),
}

#: Stands for a name that a module does not have; None may be a value.
_ABSENT = object()
_replaced: list[tuple[Any, str, Any]] = []
_bare_numbers = BareNumbers()
#: The model of the devices, if the environment asks for one.
_models: list[storages.PlainModel] = []


def install_where_asked() -> None:
    """Install the emulation if the environment requests it.

    PyTorch calls this function when it is imported in a rank, or in a process of one.
    """
    seed = emulation.seed_of_checks(os.environ)
    if seed is not None and not torch.cuda.is_available():
        from smp_emulation import checked

        checked.install(seed)
        atexit.register(checked.report)
    elif emulation.is_asked_for(os.environ):
        install()


def install() -> bool:
    """Let ``torch.cuda`` of this process answer on the CPU.

    Returns:
        Whether it does; False where there is a GPU, which is used then.
    """
    if smp_emulation.is_active():
        return True
    if torch.cuda.is_available():
        return False
    # What "with torch.device(…)" acts on: PyTorch asks once, and our stand-ins call the functions that it knows.
    importlib.import_module("torch.utils._device")._device_constructors()
    for call in CALLS:
        _put(call)
    _bare_numbers.install()
    _read_cuda_storages()
    ordering.make_default_streams()
    smp_emulation._installed = True
    if storages.is_wanted():
        _models.append(storages.PlainModel(_set))
    return True


def uninstall() -> None:
    """Restore PyTorch's own calls."""
    while _models:
        _models.pop().close()
    _bare_numbers.uninstall()
    while _replaced:
        owner, name, before = _replaced.pop()
        if before is _ABSENT:
            delattr(owner, name)
        else:
            setattr(owner, name, before)
    smp_emulation._installed = False


@contextlib.contextmanager
def emulated() -> Iterator[None]:
    """Emulate inside; for tests."""
    install()
    try:
        yield
    finally:
        uninstall()


def _put(call: CoveredCall) -> None:
    way, _, name = call.name.rpartition(".")
    owner = _owner(way)
    if owner is None:
        return
    original = getattr(owner, name, _ABSENT)
    if original is _ABSENT and not call.is_new:
        return  # this release of PyTorch has no such name
    value = call.replacement(None if original is _ABSENT else original)
    _set(owner, name, value)
    if original is None:
        return
    for other in _ALSO_IN.get(way, ()):
        place = _owner(other)
        # Only the same object: a script or a library may have put its own there.
        if place is not None and vars(place).get(name, _ABSENT) is original:
            _set(place, name, value)


def _set(owner: Any, name: str, value: Any) -> None:
    # Save only the class's own attribute: an inherited one comes back when the name is deleted.
    _replaced.append((owner, name, vars(owner).get(name, _ABSENT)))
    setattr(owner, name, value)


def _owner(way: str) -> Any:
    """Return the module or class named ``way``, or None if there is none."""
    try:
        return importlib.import_module(way)
    except ImportError:
        pass  # a class, or a module that this release lacks
    parent, _, name = way.rpartition(".")
    owner = _owner(parent) if parent else None
    return getattr(owner, name, None)


def _read_cuda_storages() -> None:
    """Let ``torch.load`` put what was saved on a GPU, or is asked for there, on the CPU."""

    def place(storage: Any, location: str) -> Any:
        if not smp_emulation.is_active() or not location.startswith("cuda"):
            return None
        devices.real_device(location)
        return storage

    if not _has_registered:
        torch.serialization.register_package(_BEFORE_CPU_AND_CUDA, lambda storage: None, place)
        _has_registered.append(True)


#: PyTorch asks in ascending order; its own are 10 for the CPU and 20 for CUDA.
_BEFORE_CPU_AND_CUDA = 5
_has_registered: list[bool] = []
