"""Serialization of plain data, for messages without a seal: reading it never runs code of its writer."""

from __future__ import annotations

import collections
import dataclasses
import datetime
import enum
import io
import pathlib
import pickle
import sys
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch

from smp_config.machine.launchers import SECRET_VARIABLE
from smp_runtime.errors import SMPUserError

#: Classes that only hold values, whichever code calls them. A pickle cannot set attributes of the classes themselves.
_CLASSES: dict[tuple[str, str], Any] = {
    (kind.__module__, kind.__qualname__): kind
    for kind in (
        *(complex, set, frozenset, bytearray, range, slice, int, float, str, bytes, bool, list, dict, tuple),
        *(collections.OrderedDict, collections.defaultdict, collections.deque),
        *(datetime.date, datetime.time, datetime.datetime, datetime.timedelta, datetime.timezone),
        *(torch.Size, torch.device),
    )
}
#: Packages with records that may travel in messages.
_OURS = ("smp_config.", "smp_integrations.", "smp_records.", "smp_runtime.", "smp_tools.")


def to_bytes(value: Any) -> bytes:
    """Serialize a value that is plain data.

    Plain data are numbers, texts, containers, tensors, NumPy arrays, dates, paths, and this library's own records.

    Raises:
        SMPUserError: it contains an object of another class.
    """
    buffer = io.BytesIO()
    _Writer(buffer, protocol=5).dump(value)
    return buffer.getvalue()


def from_bytes(data: bytes) -> Any:
    """Return the value that :func:`to_bytes` serialized.

    Raises:
        ValueError: the bytes are not from :func:`to_bytes`, or name a class that is not plain data.
    """
    try:
        return _Reader(io.BytesIO(data)).load()
    except Exception as error:  # a stranger's bytes may fail in any way
        raise ValueError(f"{len(data):,} bytes are no message of plain data: {type(error).__name__}: {error}") from None


class _Writer(pickle.Pickler):
    """Refuses what :class:`_Reader` would not read."""

    def reducer_override(self, obj: Any) -> Any:
        """Return a harmless way to rebuild an object, or ``NotImplemented`` if its default one is harmless."""
        if isinstance(obj, torch.Tensor):
            file = io.BytesIO()
            torch.save(obj, file)
            return _tensor, (file.getvalue(),)
        if isinstance(obj, np.ndarray | np.generic) and not obj.dtype.hasobject:
            file = io.BytesIO()
            np.save(file, obj, allow_pickle=False)
            return _array, (file.getvalue(), isinstance(obj, np.generic))
        if isinstance(obj, pathlib.PurePath):
            return _path, (str(obj), isinstance(obj, pathlib.Path))
        if isinstance(obj, torch.dtype) or any(obj is function for function in _FUNCTIONS.values()):
            return NotImplemented
        kind = obj if isinstance(obj, type) else type(obj)
        if _CLASSES.get((kind.__module__, kind.__qualname__)) is kind:
            return NotImplemented
        fields = None if kind is obj else _fields_of(obj)
        if fields is not None:
            return _record, (kind.__module__, kind.__qualname__, fields)
        raise SMPUserError(
            f"an object of {kind.__module__}.{kind.__qualname__} cannot be sent to another rank: these ranks have no secret by "
            "which they would know their messages from those of a stranger, so that only data is read (numbers, texts, containers, "
            f"tensors, arrays); send data, start the job with 'smp-launch run SCRIPT' or mpirun, or set {SECRET_VARIABLE} to one "
            "random text on all hosts (docs/security.md)",
            code="SMP311",
        )


class _Reader(pickle.Unpickler):
    """An unpickler that loads by name only plain data."""

    def find_class(self, module: str, name: str) -> Any:
        """Return the function, type or class that a name stands for, if it is allowed in plain data."""
        if module == __name__ and name in _FUNCTIONS:
            return _FUNCTIONS[name]
        if module == "torch":
            found = getattr(torch, name, None)
            if isinstance(found, torch.dtype):
                return found
        if (module, name) in _CLASSES:
            return _CLASSES[module, name]
        raise pickle.UnpicklingError(f"{module}.{name} is no data")


def _fields_of(obj: Any) -> Any:
    """Return the contents of a record of this library, or None for other objects."""
    kind = type(obj)
    if not kind.__module__.startswith(_OURS):
        return None
    # A class inside another one or inside a function is not found again by its name.
    if "." in kind.__qualname__:
        return None
    if isinstance(obj, enum.Enum):
        return obj.name
    if _is_model(kind):
        return obj.model_dump()
    if _is_named_tuple(kind):
        return dict(zip(vars(kind)["_fields"], obj, strict=True))
    if dataclasses.is_dataclass(obj):
        return {field.name: getattr(obj, field.name) for field in dataclasses.fields(obj)}
    return None


def _is_model(kind: Any) -> bool:
    from pydantic import BaseModel  # here: the ranks of a script without records need not wait for it

    return issubclass(kind, BaseModel)


def _is_named_tuple(kind: type) -> bool:
    return kind.__bases__ == (tuple,) and hasattr(kind, "_fields")


def _has_fields(kind: Any, names: Iterable[str]) -> bool:
    return set(names) == {field.name for field in dataclasses.fields(kind)}


def _record(module: str, name: str, fields: Any) -> Any:
    """Build a record of this library from its fields; only the checks of its fields are run as code."""
    if not (isinstance(module, str) and module.startswith(_OURS)):
        raise ValueError(f"{module} is no module of this library")
    found: Any = vars(sys.modules[module])[name]
    kind = found
    if not isinstance(kind, type) or kind.__module__ != module:
        raise ValueError(f"{module}.{name} is no record")
    if issubclass(kind, enum.Enum):
        return kind[fields]
    if _is_model(kind):
        return found.model_validate(fields)
    if _is_named_tuple(kind):
        return kind(**fields)
    if not dataclasses.is_dataclass(kind) or not _has_fields(kind, fields):
        raise ValueError(f"{module}.{name} is no record of {sorted(fields)}")
    # Without the constructor, which may do more than store its arguments.
    made = object.__new__(kind)
    for field, value in fields.items():
        object.__setattr__(made, field, value)
    return made


def _tensor(data: bytes) -> torch.Tensor:
    found: torch.Tensor = torch.load(io.BytesIO(data), weights_only=True)
    return found


def _array(data: bytes, is_number: bool) -> Any:
    found = np.load(io.BytesIO(data), allow_pickle=False)
    return found[()] if is_number else found


def _path(text: str, is_real: bool) -> pathlib.PurePath:
    return pathlib.Path(text) if is_real else pathlib.PurePath(text)


#: Functions that a message may call.
_FUNCTIONS = {function.__name__: function for function in (_record, _tensor, _array, _path)}
