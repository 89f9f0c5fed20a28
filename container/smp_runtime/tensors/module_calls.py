"""Handlers that answer the calls of a module: the only place that writes ``_call_impl``.

``nn.Module.__call__`` runs the module's ``_call_impl``, including hooks. An entry in the module's own
dictionary takes precedence over that of its class. So a handler can answer the calls, while the module, its
type and its hooks stay as they are, and other modules are not patched. A rank of a pipeline sends calls of
other stages' modules to those stages. A checkpointed module keeps only its inputs. If both apply to a
module, the other stage answers: it checkpoints there.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from torch import nn


class CallHandler(Protocol):
    """A function that is called in place of a module.

    Attributes:
        is_elsewhere: whether the module runs on another rank.
    """

    is_elsewhere: bool

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return the module's result."""


def answer(module: nn.Module, by: CallHandler) -> None:
    """Send a module's calls to ``by``, unless they go to another rank already."""
    if by.is_elsewhere or not getattr(answer_of(module), "is_elsewhere", False):
        module.__dict__["_call_impl"] = by
    if by.is_elsewhere:  # a compiled form of the module here must not answer
        module.__dict__["_compiled_call_impl"] = None


def answer_itself(module: nn.Module, instead_of: CallHandler | None = None) -> None:
    """Let a module answer its own calls again; with ``instead_of``, only if that is its current handler."""
    if instead_of is None or answer_of(module) is instead_of:
        module.__dict__.pop("_call_impl", None)


def answer_of(module: nn.Module) -> Any:
    """Return the handler of a module's calls, or None if the module answers them itself."""
    return module.__dict__.get("_call_impl")


def own_call(module: nn.Module) -> Callable[..., Any]:
    """Return the module's own call, including hooks, whatever handler it has."""
    return functools.partial(type(module)._call_impl, module)  # noqa: SLF001 - see the module's docstring
