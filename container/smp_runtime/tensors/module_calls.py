"""Who answers a module's call: the one place that writes ``_call_impl``.

``nn.Module.__call__`` runs the module's ``_call_impl``, hooks and all; one in the module's own dictionary goes before that
of its class. So a call can be answered by somebody else, while the module, its type and its hooks stay as they are, and
nothing is patched for other modules. A rank of a pipeline sends calls of other stages' modules there; a checkpointed module
keeps only its inputs. Where both want a module, the other stage answers: it checkpoints there.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from torch import nn


class CallHandler(Protocol):
    """What is called in the place of a module.

    Attributes:
        is_elsewhere: whether the module runs on another rank.
    """

    is_elsewhere: bool

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The module's result."""


def answer(module: nn.Module, by: CallHandler) -> None:
    """Calls of a module go to ``by``, unless they go to another rank already."""
    if by.is_elsewhere or not getattr(answer_of(module), "is_elsewhere", False):
        module.__dict__["_call_impl"] = by
    if by.is_elsewhere:  # what a compiler made of the module here does not count
        module.__dict__["_compiled_call_impl"] = None


def answer_itself(module: nn.Module, instead_of: CallHandler | None = None) -> None:
    """A module answers its own calls again; with ``instead_of``, only if that did."""
    if instead_of is None or answer_of(module) is instead_of:
        module.__dict__.pop("_call_impl", None)


def answer_of(module: nn.Module) -> Any:
    """Who answers a module's calls; None for the module itself."""
    return module.__dict__.get("_call_impl")


def own_call(module: nn.Module) -> Callable[..., Any]:
    """The module's own call, hooks and all, whoever answers."""
    return functools.partial(type(module)._call_impl, module)  # noqa: SLF001 - see the module's docstring
