"""A covered call: a name in PyTorch, and its replacement."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from types import FunctionType
from typing import Any

from smp_emulation.errors import make_refusal, refusing_class

#: Packages that always get the true answers about tensors; only other code gets emulated answers.
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


def answer_with(name: str, does: str, value: Any) -> CoveredCall:
    """Return a covered call that is replaced by ``value``."""
    return CoveredCall(name, does, lambda original: _own(original, value))


def answer_each(owner: str, names: Iterable[str], does: str, value: Any) -> list[CoveredCall]:
    """Return covered calls that are all replaced by ``value``: the ``names`` of one module, such as ``torch.cuda``."""
    return [answer_with(f"{owner}.{name}", does, value) for name in names]


def _own(original: Any, value: Any) -> Any:
    """Return ``value``, or a copy of it if it is a function.

    PyTorch's compiler distinguishes functions by identity, and inspects what some of them wrap.
    """
    if not isinstance(value, FunctionType):
        return value
    copy = FunctionType(value.__code__, value.__globals__, value.__name__, value.__defaults__, value.__closure__)
    copy.__kwdefaults__ = value.__kwdefaults__
    copy.__wrapped__ = getattr(original, "__wrapped__", original)  # type: ignore[attr-defined]
    return copy


def do_nothing(*args: object, **kwargs: object) -> None:
    """Do nothing, whatever the arguments."""


def refuse_call(name: str, why: str, way_out: str = "", is_class: bool = False) -> CoveredCall:
    """Return a covered call that raises NeedsGpuError; a class raises it when it is instantiated."""
    refuse = refusing_class if is_class else make_refusal
    value = refuse(name, why, way_out)
    return CoveredCall(name, f"refused: {why}", lambda original: _own(original, value), is_refused=True)


def refuse_each(
    owner: str, names: Iterable[str], why: str, way_out: str = "", is_class: bool = False
) -> list[CoveredCall]:
    """Return covered calls of one module that all raise NeedsGpuError; see :func:`refuse_call`."""
    return [refuse_call(f"{owner}.{name}", why, way_out, is_class) for name in names]


def asked_by_pytorch_or_us(depth: int = 2) -> bool:
    """Return whether the caller of the calling function is PyTorch's own code or this library's, not a script."""
    name = sys._getframe(depth).f_globals.get("__name__", "")
    return name.partition(".")[0] in _INTERNAL
