"""Which parameters of transformed models are parts of larger ones, and of which."""

from __future__ import annotations

from typing import TYPE_CHECKING

from smp_runtime.nn.distributed_module import DistributedModule

if TYPE_CHECKING:
    from torch import nn

    from smp_runtime.parameters.registry import TensorSlice


def find_slices(model: nn.Module) -> dict[nn.Parameter, TensorSlice]:
    """Return the parameters that tensor parallelism has split, with their places in the whole ones.

    Asked of the modules, since ``fully_shard`` puts other parameters in place of those that ``tsm.transform`` has made.
    """
    found: dict[nn.Parameter, TensorSlice] = {}
    for module in model.modules():
        if not isinstance(module, DistributedModule) or module.tensor_group.size == 1:
            continue
        for name, where in module.tensor_slices.items():
            parameter = module._parameters.get(name)
            if parameter is not None and where.shape != where.local_shape:
                found[parameter] = where
    return found
