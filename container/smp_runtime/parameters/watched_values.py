"""Values of parameters as the library has last seen them."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Protocol

from smp_runtime.tensors.host_memory.snapshot import wait_for_copies
from smp_runtime.tensors.parameter_attributes import get_data, get_gradient, owner_of, set_data, set_gradient
from smp_runtime.tensors.torch_private import DisableTorchFunctionSubclass

if TYPE_CHECKING:
    import torch
    from torch import nn


class GradientSource(Protocol):
    """A source of gradients that lie elsewhere than with their parameters."""

    def read(self, parameter: nn.Parameter) -> torch.Tensor | None:
        """Return ``parameter.grad``."""

    def write(self, parameter: nn.Parameter, value: torch.Tensor | None) -> None:
        """Take ``parameter.grad = value``."""


class WatchedValues:
    """The values of one tensor as the library has last seen them; the source of its ``data`` and ``grad``.

    It holds neither the tensor nor the tensor's owner, since that would keep them alive for ever.

    Args:
        gradients: supplies the parameter's gradient, while it exists; None if the gradient lies with the parameter.
    """

    __slots__ = ("_address", "_gradients", "_is_touched", "_version")

    def __init__(self, parameter: nn.Parameter, gradients: GradientSource | None = None) -> None:
        self._gradients = None if gradients is None else weakref.ref(gradients)
        self.note(parameter)

    def note(self, parameter: nn.Parameter) -> None:
        """Take the values that are there now as known; subclasses of tensors are not asked."""
        with DisableTorchFunctionSubclass():
            self.note_plain(parameter)

    def note_plain(self, parameter: nn.Parameter) -> None:
        """Record the current values, if the dispatch to tensor subclasses is already disabled."""
        self._version = parameter._version
        self._address = parameter.data_ptr()
        self._is_touched = False

    def is_changed(self, parameter: nn.Parameter) -> bool:
        """Return whether anything may have been written since; call it where subclasses of tensors are not asked."""
        was_written = self._is_touched or parameter._version != self._version
        return was_written or parameter.data_ptr() != self._address

    def is_elsewhere(self, parameter: nn.Parameter) -> bool:
        """Return whether the parameter has other memory than it had."""
        return parameter.data_ptr() != self._address

    def read_data(self, parameter: nn.Parameter) -> torch.Tensor:
        """Return ``parameter.data``, through which the script may write."""
        self._is_touched = True
        wait_for_copies()
        return get_data(parameter)

    def gathered_with(self, parameter: nn.Parameter) -> None:
        """Return None: the rank has the whole parameter."""

    def write_data(self, parameter: nn.Parameter, value: torch.Tensor) -> None:
        """Apply ``parameter.data = value``; the address reveals it."""
        set_data(parameter, value)

    def read_gradient(self, parameter: nn.Parameter) -> torch.Tensor | None:
        """Return ``parameter.grad``, from other ranks if it lies there."""
        source = self._source
        return get_gradient(parameter) if source is None else source.read(parameter)

    def write_gradient(self, parameter: nn.Parameter, value: torch.Tensor | None) -> None:
        """Take ``parameter.grad = value``."""
        source = self._source
        if source is None:
            set_gradient(parameter, value)
        else:
            source.write(parameter, value)

    @property
    def _source(self) -> GradientSource | None:
        return None if self._gradients is None else self._gradients()


def note_values(parameter: nn.Parameter) -> None:
    """Record a tensor's current values after the library itself has written into it."""
    owner = owner_of(parameter)
    if isinstance(owner, WatchedValues):
        owner.note(parameter)
