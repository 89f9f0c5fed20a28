"""``data`` and ``grad`` of parameters, which ask the parameter's owner in the runtime before the script gets them.

A write through ``parameter.data`` changes neither the parameter's version counter nor its address, and the
gradient of a parameter may be on other ranks. So reads and writes of these two attributes are intercepted, for
parameters that have an owner.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import nn

#: PyTorch's own attributes, which this module replaces.
_DATA: Any = torch.Tensor.data
_GRAD: Any = torch.Tensor.grad


class GatheredValues(Protocol):
    """Sharded parameters while their whole values are in memory.

    Attributes:
        writes: how many times values were written into the whole, except through a tensor that ``data`` returned.
    """

    writes: int

    def begin_repeat(self) -> None:
        """Begin a repetition of a forward pass, whose writes must be those of the first one."""

    def end_repeat(self) -> bool:
        """Return whether the repetition has written other values."""


class Owner(Protocol):
    """Answers for ``data`` and ``grad`` of the parameters that it owns."""

    def read_data(self, parameter: nn.Parameter) -> torch.Tensor:
        """Return ``parameter.data``."""

    def write_data(self, parameter: nn.Parameter, value: torch.Tensor) -> None:
        """Take ``parameter.data = value``."""

    def gathered_with(self, parameter: nn.Parameter) -> GatheredValues | None:
        """Return what gathers the parameter, or None if this rank has all of it."""

    def read_gradient(self, parameter: nn.Parameter) -> torch.Tensor | None:
        """Return ``parameter.grad``."""

    def write_gradient(self, parameter: nn.Parameter, value: torch.Tensor | None) -> None:
        """Take ``parameter.grad = value``."""


#: By ``id`` of the parameter. Not an attribute of the parameter: that would be copied and saved with it.
_OWNERS: dict[int, Owner] = {}

#: Sessions that have asked for the attributes and not closed.
_users = 0


def own(parameter: nn.Parameter, owner: Owner) -> None:
    """Make ``owner`` answer for a parameter, in place of any former owner."""
    if id(parameter) not in _OWNERS:
        weakref.finalize(parameter, _OWNERS.pop, id(parameter), None).atexit = False
    _OWNERS[id(parameter)] = owner


def owner_of(parameter: torch.Tensor) -> Owner | None:
    """Return the owner of a parameter, or None."""
    return _OWNERS.get(id(parameter))


def get_data(parameter: torch.Tensor) -> torch.Tensor:
    """Return ``parameter.data`` as PyTorch has it, without asking the owner."""
    data: torch.Tensor = _DATA.__get__(parameter)
    return data


def set_data(parameter: torch.Tensor, value: torch.Tensor) -> None:
    """Set ``parameter.data`` without notifying the owner."""
    _DATA.__set__(parameter, value)


def get_gradient(parameter: torch.Tensor) -> torch.Tensor | None:
    """Return ``parameter.grad`` as PyTorch has it, without asking the owner."""
    gradient: torch.Tensor | None = _GRAD.__get__(parameter)
    return gradient


def set_gradient(parameter: torch.Tensor, value: torch.Tensor | None) -> None:
    """Set ``parameter.grad`` without notifying the owner."""
    _GRAD.__set__(parameter, value)


def install() -> Callable[[], None]:
    """Install the attributes on ``nn.Parameter``; return the function that removes them."""
    global _users
    _users += 1
    if _users == 1:
        nn.Parameter.data = property(_read_data, _write_data)  # type: ignore[assignment]
        nn.Parameter.grad = property(_read_gradient, _write_gradient, _delete_gradient)  # type: ignore[assignment]
    return _uninstall


def _uninstall() -> None:
    global _users
    _users -= 1
    if _users == 0:
        del nn.Parameter.data, nn.Parameter.grad


def _read_data(parameter: nn.Parameter) -> torch.Tensor:
    owner = _OWNERS.get(id(parameter))
    return get_data(parameter) if owner is None else owner.read_data(parameter)


def _write_data(parameter: nn.Parameter, value: torch.Tensor) -> None:
    owner = _OWNERS.get(id(parameter))
    if owner is None:
        set_data(parameter, value)
    else:
        owner.write_data(parameter, value)


def _read_gradient(parameter: nn.Parameter) -> torch.Tensor | None:
    owner = _OWNERS.get(id(parameter))
    return get_gradient(parameter) if owner is None else owner.read_gradient(parameter)


def _write_gradient(parameter: nn.Parameter, value: torch.Tensor | None) -> None:
    owner = _OWNERS.get(id(parameter))
    if owner is None:
        set_gradient(parameter, value)
    else:
        owner.write_gradient(parameter, value)


def _delete_gradient(parameter: nn.Parameter) -> None:
    _write_gradient(parameter, None)
