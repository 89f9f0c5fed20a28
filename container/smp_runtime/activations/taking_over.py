"""Models of other libraries that checkpoint themselves: what they ask for is done here, where their layers run."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch import nn

from smp_runtime.activations import marking
from smp_runtime.activations.functional import checkpoint
from smp_runtime.activations.self_checkpointing import FLAG, FUNCTION, checkpoints_itself, passes


def take_over(model: nn.Module) -> None:
    """Checkpoint here what checkpoints itself; on every rank, so that callers and owners agree."""
    for module in model.modules():
        function = module.__dict__.get(FUNCTION)
        if function is passes and not getattr(module, FLAG):  # switched off since
            marking.unmark(module)
        if function is None or function is passes or isinstance(function, _Ours) or not getattr(module, FLAG, False):
            continue
        settings = function.keywords if isinstance(function, functools.partial) else {}
        preserve = bool(settings.get("preserve_rng_state", True))
        if checkpoints_itself(module):
            marking.mark(module, preserve)
        else:
            module.__dict__[FUNCTION] = _Ours(preserve)


class _Ours:
    """The checkpointing function of a model that calls it around the calls of its layers."""

    def __init__(self, preserve_rng_state: bool) -> None:
        self._preserve = preserve_rng_state

    def __call__(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        for ignored in ("use_reentrant", "preserve_rng_state"):
            kwargs.pop(ignored, None)
        owner = getattr(function, "__self__", None)
        is_call = getattr(function, "__name__", "") in ("__call__", "forward", "_call_impl", "_wrapped_call_impl")
        module = owner if is_call and isinstance(owner, nn.Module) else function
        return checkpoint(module, *args, preserve_rng_state=self._preserve, **kwargs)
