"""What PyTorch's FSDP, and its wrappers of modules, keep private."""

# ruff: noqa: SLF001 - this folder is the place for private names

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import nn

#: What FSDP, wrappers that checkpoint or offload, and the compiler add to names of parameters.
_WRAPPERS = re.compile(r"(?:_fsdp_wrapped_module|_checkpoint_wrapped_module|_orig_mod)\.")

#: The parameter that a unit of FSDP joins its own in, by its name in a local state dict.
JOINED_PARAMETER = "_fsdp_wrapped_module._flat_param"


def name_without_wrappers(name: str) -> str:
    """Return the name that a parameter has without the wrappers of modules around it."""
    return _WRAPPERS.sub("", name)


def keeps_parameters(unit: nn.Module) -> bool:
    """Return whether a unit of FSDP was made with ``use_orig_params``."""
    return bool(getattr(unit, "_use_orig_params", False))


def lacking_gradients(unit: nn.Module) -> tuple[list[bool], Sequence[nn.Parameter]]:
    """Return which parameters of a unit FSDP takes to have no gradient, and these; a change in the list reaches FSDP.

    Both are empty where FSDP marks none: without ``use_orig_params``, and before a unit's first use.
    """
    joined: Any = getattr(getattr(unit, "_handle", None), "flat_param", None)
    return getattr(joined, "_is_grad_none_mask", None) or [], getattr(joined, "_params", None) or ()


def free_gathered_parameters(unit: nn.Module) -> None:
    """Free the parameters that an idle unit of FSDP has gathered, and keep its shard; nothing in the middle of a backward pass."""
    from torch.distributed.fsdp import _runtime_utils
    from torch.distributed.fsdp._flat_param import HandleTrainingState

    state: Any = unit
    handle = state._handle
    if handle is not None and handle._training_state == HandleTrainingState.IDLE:
        _runtime_utils._reshard(state, handle, True)


def is_outermost(module: Any) -> bool:
    """Return whether no unit of ``fully_shard`` is around that of a module; known once the model was called."""
    return bool(module._get_fsdp_state()._is_root)
