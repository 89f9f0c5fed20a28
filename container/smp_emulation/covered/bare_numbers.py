"""``torch.device(0)`` as a CUDA device, as on a GPU machine.

On such a machine, PyTorch resolves a bare number to the accelerator that it has.

Transformers and Accelerate write devices like this where they place a model (``device_map``). ``torch.device`` is a C type:
its attributes cannot be set. It cannot be replaced by another type either, because PyTorch compares with it. So this module
adds a ``__new__`` to the type, as Python does for a class that defines one.
"""

from __future__ import annotations

import ctypes
import gc
from typing import Any

import torch

_Make = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.py_object, ctypes.py_object, ctypes.py_object)
#: Offset of ``tp_new`` in a type object, in bytes: the address of the function that makes its instances.
_PLACE = 39 * ctypes.sizeof(ctypes.c_void_p)


class _Plain:
    pass


class _SampleClass:
    def __new__(cls) -> _SampleClass:
        return object.__new__(cls)


class _Another:
    def __new__(cls) -> _Another:
        return object.__new__(cls)


class BareNumbers:
    """Takes numbers as devices, between :meth:`install` and :meth:`uninstall`."""

    def __init__(self) -> None:
        self._before: tuple[int, Any] | None = None

    def install(self) -> bool:
        """Begin.

        Returns:
            Whether this Python's types are laid out as is known here; nothing has been changed where they are not.
        """
        if self._before is not None or not _is_known():
            return self._before is not None
        address = _slot(torch.device).value or 0
        make = _Make(address)

        def new(kind: type, *args: Any, **kwargs: Any) -> torch.device:
            if len(args) == 1 and type(args[0]) is int and args[0] >= 0 and not kwargs:
                args = ("cuda", args[0])
            made: torch.device = make(kind, args, kwargs)
            return made

        attributes = _attributes()
        self._before = address, attributes["__new__"]
        attributes["__new__"] = staticmethod(new)
        self._point_to(_slot(_SampleClass).value or 0)
        return True

    def uninstall(self) -> None:
        """End."""
        if self._before is None:
            return
        address, _attributes()["__new__"] = self._before
        self._point_to(address)
        self._before = None

    @staticmethod
    def _point_to(address: int) -> None:
        _slot(torch.device).value = address
        ctypes.pythonapi.PyType_Modified(ctypes.py_object(torch.device))


def _slot(kind: type) -> ctypes.c_void_p:
    return ctypes.c_void_p.from_address(id(kind) + _PLACE)


def _is_known() -> bool:
    """Return whether type slots look as expected.

    Classes with a ``__new__`` must share one address in the slot, other classes must have ``object``'s, and ``torch.device``
    must have its own.
    """
    ours, plain = _slot(_SampleClass).value, _slot(_Plain).value
    own = _slot(torch.device).value
    return (
        ours == _slot(_Another).value
        and plain == _slot(object).value
        and len({ours, plain, own, None}) == 4
        and type(_attributes()) is dict
    )


def _attributes() -> Any:
    """Return the dictionary behind the read-only view of the type's attributes."""
    return gc.get_referents(torch.device.__dict__)[0]
