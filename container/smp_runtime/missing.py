"""Names of the original library that this version does not have yet: an error that says so, instead of a bare one."""

from __future__ import annotations

from typing import Any

_LATER = {
    "partition": "pipeline parallelism",
    "set_partition": "pipeline parallelism",
    "tensor_parallelism": "tensor parallelism",
    "set_tensor_parallelism": "tensor parallelism",
    "tp_register": "tensor parallelism",
    "tp_register_with_module": "tensor parallelism",
    "nn": "tensor parallelism",
    "register_parameter": "sharded data parallelism",
    "set_activation_checkpointing": "activation checkpointing (torch.utils.checkpoint works inside the model)",
    "patches": "activation checkpointing (torch.utils.checkpoint works inside the model)",
}


def __getattr__(name: str) -> Any:
    """What a module that imports this function answers for a name that it does not have."""
    if name in _LATER:
        raise AttributeError(
            f"smp.{name} belongs to {_LATER[name]}, which this version of the library does not have yet"
        )
    raise AttributeError(f"module 'smdistributed.modelparallel.torch' has no attribute {name!r}")
