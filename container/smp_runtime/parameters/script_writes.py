"""Values that a script writes into parameters between the library's calls, found and adopted.

With float32 copies or sharded state the optimizer does not update the parameter itself. A value that the script writes
into the parameter must reach the updated copy, or the next update would undo it. Three things reveal a write: the
version counter (in-place operations), the address (``p.data = tensor``), and a read of ``p.data``, which allows any
unseen write. Only then values are compared, on the device: the host does not wait.

A NumPy array over ``p.detach()`` reveals nothing: writes through it stay unseen.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING

import torch
from torch import nn

from smp_runtime.errors import SMPUserError
from smp_runtime.parameters.watched_values import GradientSource, WatchedValues
from smp_runtime.tensors.parameter_attributes import get_data, own, set_data
from smp_runtime.tensors.torch_private import DisableTorchFunctionSubclass

if TYPE_CHECKING:
    from smp_runtime.parameters.optimizer_shards import OptimizerShard


class ScriptWrites:
    """A detector of a script's writes into the parameters of one model, which also adopts them.

    Args:
        parameters: those that an optimizer updates through another tensor, in memory from the library.
        optimizer_shards: the updated part of each on this rank, or None.
        name_of: a parameter's name, for messages.
        settle: waits for pending values of the parameters.
        gradients: of the model, if they are reduced to their owners.
    """

    def __init__(
        self,
        parameters: Iterable[nn.Parameter],
        optimizer_shards: Mapping[nn.Parameter, OptimizerShard | None],
        name_of: Callable[[nn.Parameter], str],
        settle: Callable[[], None],
        gradients: GradientSource | None = None,
    ) -> None:
        self._optimizer_shards = optimizer_shards
        self._name_of = name_of
        self._settle = settle
        self._watched: list[tuple[nn.Parameter, WatchedValues, torch.Tensor]] = []
        for parameter in parameters:
            values = WatchedValues(parameter, gradients)
            own(parameter, values)
            self._watched.append((parameter, values, get_data(parameter)))

    @torch.no_grad()
    def adopt(self) -> None:
        """Adopt the values that the script has written since the last call, so that training continues from them.

        Raises:
            SMPUserError: ``p.data`` was set to a tensor of another shape.
        """
        with DisableTorchFunctionSubclass():
            changed = [each for each in self._watched if each[1].is_changed(each[0])]
        if not changed:
            return
        self._settle()
        for parameter, values, home in changed:
            self._adopt(parameter, values, home)
            values.note(parameter)

    def _adopt(self, parameter: nn.Parameter, values: WatchedValues, home: torch.Tensor) -> None:
        shard = self._optimizer_shards.get(parameter)
        written = get_data(parameter)
        if values.is_elsewhere(parameter):
            check_shape(self._name_of(parameter), home.shape, written)
            # The parameter goes back to the memory that collectives and updates write into.
            home.copy_(written)
            set_data(parameter, home)
            if shard is not None and written.dtype is not home.dtype:
                shard.take(written)  # unrounded
                return
        if shard is not None:
            shard.adopt()


def check_shape(name: str, shape: torch.Size, value: torch.Tensor) -> None:
    """Refuse values of another shape than the parameter was wrapped with.

    Raises:
        SMPUserError: names the parameter and both shapes.
    """
    if value.shape != shape:
        raise SMPUserError(
            f"{name}.data was set to a tensor of shape {list(value.shape)}, but the parameter was wrapped with {list(shape)}: the "
            "optimizer and the other ranks know it with that shape; change shapes before smp.DistributedModel",
            code="SMP303",
        )
