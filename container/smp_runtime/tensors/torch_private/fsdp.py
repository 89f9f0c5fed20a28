"""What PyTorch's FSDP, and its wrappers of modules, keep private."""

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
