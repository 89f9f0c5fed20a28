"""One covered call: which name of PyTorch is answered by what."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from types import FunctionType
from typing import Any

from smp_emulation.errors import refusing, refusing_class

#: Code that is never misled: it hears of tensors what is true.
_INTERNAL = frozenset({"torch", "smdistributed", "smp_emulation", "smp_integrations", "smp_runtime", "smp_tools"})


@dataclass(frozen=True)
class CoveredCall:
    """A name of PyTorch that answers for a GPU while the emulation is on.

    Attributes:
        name: as scripts write it, for example ``torch.cuda.synchronize``.
        does: what it does here, in a few words; documents and tests list it.
        replacement: from what stands there (None if this PyTorch has no such name) to what shall.
        is_new: whether it is put there even where this PyTorch, built without CUDA, has no such name.
        is_refused: whether every use raises NeedsGpuError.
    """

    name: str
    does: str
    replacement: Callable[[Any], Any]
    is_new: bool = False
    is_refused: bool = False


def instead(name: str, does: str, value: Any, is_new: bool = False) -> CoveredCall:
    """A call that is answered without what PyTorch has."""
    return CoveredCall(name, does, lambda original: _own(original, value), is_new)


def _own(original: Any, value: Any) -> Any:
    """``value``; of a function a copy, since PyTorch's compiler tells functions apart, and looks behind some of them."""
    if not isinstance(value, FunctionType):
        return value
    copy = FunctionType(value.__code__, value.__globals__, value.__name__, value.__defaults__, value.__closure__)
    copy.__kwdefaults__ = value.__kwdefaults__
    copy.__wrapped__ = getattr(original, "__wrapped__", original)  # type: ignore[attr-defined]
    return copy


def nothing(*args: object, **kwargs: object) -> None:
    """Does nothing, for whatever arguments."""


def refused(name: str, why: str, way_out: str = "", is_class: bool = False) -> CoveredCall:
    """A call that raises NeedsGpuError; a class raises when it is made."""
    value = (refusing_class if is_class else refusing)(name, why, way_out)
    return CoveredCall(name, f"refused: {why}", lambda original: _own(original, value), is_refused=True)


def asked_by_pytorch_or_us(depth: int = 2) -> bool:
    """Whether the function that calls is asked by PyTorch's own code or this library's, not by a script."""
    name = sys._getframe(depth).f_globals.get("__name__", "")
    return name.partition(".")[0] in _INTERNAL
