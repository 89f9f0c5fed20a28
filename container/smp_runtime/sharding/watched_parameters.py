"""A module's parameters, which report reads, and the registration of parameters that other modules hold."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Protocol

from torch import nn

from smp_config.errors import kind_of
from smp_runtime.errors import SMPUserError

if TYPE_CHECKING:
    import torch

#: Attribute for the parameters that a module uses but does not hold.
REGISTERED = "_smp_registered_parameters"


class Reads(Protocol):
    """A receiver of reports of reads."""

    def read(self, parameter: torch.Tensor) -> None:
        """Handle a read of a parameter as a module's attribute."""


# No hook reports a read such as ``self.child.weight`` in the parent's forward: hooks report calls.
# A parametrization would report it, but it renames parameters and changes the module's class, which state dictionaries
# and scripts see. A function mode would see every operation of the step on every thread that is in one, but not the
# reads inside a function.
class WatchedParameters(dict):
    """A module's parameters, which report each read of one."""

    def __init__(self, parameters: Mapping[str, Any], uses: Reads) -> None:
        super().__init__(parameters)
        self._uses = weakref.ref(uses)

    def __getitem__(self, name: str) -> Any:
        parameter = super().__getitem__(name)
        uses = self._uses() if parameter is not None else None
        if uses is not None:
            uses.read(parameter)
        return parameter

    def __deepcopy__(self, memo: dict[int, Any]) -> dict[str, Any]:
        return copy.deepcopy(dict(self.items()), memo)  # for a whole copy, which gets its values from elsewhere

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise refuse_copy("pickled")


def refuse_copy(how: str) -> SMPUserError:
    """Return the error for copying a module with sharded parameters."""
    return SMPUserError(
        f"a module inside smp.DistributedModel cannot be {how} with sharded data parallelism, since this rank has only its shard "
        "of the parameters; call model.state_dict() on every rank and save it, or load it into an unwrapped model",
        code="SMP308",
    )


def register_parameter(module: nn.Module, parameter: nn.Parameter) -> None:
    """Declare that ``module`` uses a parameter of another module in its ``forward``.

    With sharded data parallelism the parameter then has its values whenever ``module`` is called. Call it while the
    model is created or any time before ``smp.DistributedModel``; without sharding it changes nothing.

    Args:
        module: the module that uses the parameter.
        parameter: a parameter of another module.

    Raises:
        SMPUserError: the first argument is not a module, or the second not a parameter.

    Example:
        >>> smp.register_parameter(head, embedding.weight)  # head multiplies by it
    """
    if not isinstance(module, nn.Module) or not isinstance(parameter, nn.Parameter):
        raise SMPUserError(
            f"register_parameter got {kind_of(module)} and {kind_of(parameter)}; pass the module that "
            "uses the parameter, and the parameter: smp.register_parameter(self, self.layer1.weight)",
            code="SMP308",
        )
    # Past nn.Module.__setattr__, so that it is no parameter of the module's own.
    module.__dict__.setdefault(REGISTERED, []).append(parameter)
