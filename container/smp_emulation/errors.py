"""Errors for calls that an emulation cannot do."""

from __future__ import annotations

from typing import Any, NoReturn

from smp_config.error_codes import Coded

_ADVICE = (
    "run this part of the script on a machine with a GPU, or leave it out where SMP_EMULATE_CUDA is 1 "
    '(os.environ.get("SMP_EMULATE_CUDA") == "1")'
)


class NeedsGpuError(Coded, RuntimeError):
    """A call that only a GPU can answer."""

    code = "SMP601"


class CudaCallError(Coded, RuntimeError):
    """A call that cannot be on a GPU either, or not on several emulated ones."""

    code = "SMP603"


def refuse(name: str, why: str, instead: str = "") -> NoReturn:
    """Raise NeedsGpuError for a call.

    Args:
        name: of the call, as scripts write it.
        why: what it needs of a GPU.
        instead: what to do; by default leave it out.
    """
    raise NeedsGpuError(
        f"{name} needs a GPU: {why}; there is none here, and torch.cuda is emulated on the CPU (SMP_EMULATE_CUDA=1), which runs "
        f"no CUDA code; {instead or _ADVICE}"
    )


def make_refusal(name: str, why: str, instead: str = "") -> Any:
    """Return a function that refuses every call."""

    def refused(*args: object, **kwargs: object) -> NoReturn:
        refuse(name, why, instead)

    refused.__name__ = refused.__qualname__ = name.rpartition(".")[2]
    return refused


class _Refusing(type):
    """Metaclass of classes that can be named, as in annotations and ``isinstance``, but not instantiated."""

    _refusal: tuple[str, str, str]

    def __call__(cls, *args: object, **kwargs: object) -> NoReturn:
        refuse(*cls._refusal)

    def __getattr__(cls, name: str) -> NoReturn:
        if name.startswith("_"):
            raise AttributeError(name)
        refuse(*cls._refusal)  # its static methods make one, too


def refusing_class(name: str, why: str, instead: str = "") -> type:
    """Return a class that refuses to be instantiated."""
    return _Refusing(name.rpartition(".")[2], (), {"_refusal": (name, why, instead)})
