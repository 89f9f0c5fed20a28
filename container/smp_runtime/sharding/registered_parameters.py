"""``smp.register_parameter``: parameters that a module uses but does not hold."""

from __future__ import annotations

from torch import nn

from smp_runtime.errors import SMPUserError

_ATTRIBUTE = "_smp_registered_parameters"


def register_parameter(module: nn.Module, parameter: nn.Parameter) -> None:
    """Tell that ``module`` uses a parameter of another module in its ``forward``.

    With sharded data parallelism the parameter then has its values whenever ``module`` is called. Call it while the
    model is created or any time before ``smp.DistributedModel``; without sharding it changes nothing.

    Raises:
        SMPUserError: the first argument is no module, or the second no parameter.
    """
    if not isinstance(module, nn.Module) or not isinstance(parameter, nn.Parameter):
        raise SMPUserError(
            f"register_parameter got a {type(module).__name__} and a {type(parameter).__name__}; pass the module that "
            "uses the parameter, and the parameter: smp.register_parameter(self, self.layer1.weight)"
        )
    # Past nn.Module.__setattr__, so that it is no parameter of the module's own.
    module.__dict__.setdefault(_ATTRIBUTE, []).append(parameter)


def registered_parameters(module: nn.Module) -> list[nn.Parameter]:
    """What was registered for a module."""
    return list(module.__dict__.get(_ATTRIBUTE, ()))
