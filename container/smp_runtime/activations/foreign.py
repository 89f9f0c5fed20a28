"""Layers that checkpoint themselves, as those of Transformers do after ``gradient_checkpointing_enable()``.

Such a layer wraps its own call on the side of the caller, which may be another stage than the one that runs it. Here the
layer keeps what it prepares for a checkpointed call (it drops caches), but the call itself passes, and the layer is
checkpointed where it runs.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch import nn

_FLAG, _FUNCTION = "gradient_checkpointing", "_gradient_checkpointing_func"


def checkpoints_itself(module: nn.Module) -> bool:
    """Whether a module has a call of its own that looks at ``gradient_checkpointing``."""
    return hasattr(type(module), _FLAG) and type(module).__call__ is not nn.Module.__call__


def let_pass(module: nn.Module) -> None:
    """A layer that is checkpointed here prepares for it, but does not do it itself."""
    if checkpoints_itself(module):
        module.__dict__[_FLAG] = True
        module.__dict__[_FUNCTION] = _pass


def take_over(model: nn.Module) -> None:
    """Checkpoint here what checkpoints itself; on every rank, so that callers and owners agree."""
    from smp_runtime.activations import marking

    for module in model.modules():
        function = module.__dict__.get(_FUNCTION)
        if function is _pass and not getattr(module, _FLAG):  # switched off since
            marking.unmark(module)
        if function is None or function is _pass or isinstance(function, _Ours) or not getattr(module, _FLAG, False):
            continue
        settings = function.keywords if isinstance(function, functools.partial) else {}
        preserve = bool(settings.get("preserve_rng_state", True))
        if checkpoints_itself(module):
            marking.mark(module, preserve)
        else:
            module.__dict__[_FUNCTION] = _Ours(preserve)


def _pass(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    # The layer has dropped caches among keyword arguments; a cache would be written a second time in backward.
    return function(*(None if _is_cache(value) else value for value in args), **kwargs)


def _is_cache(value: Any) -> bool:
    return any(kind.__module__ == "transformers.cache_utils" for kind in type(value).__mro__)


class _Ours:
    """The checkpointing function of a model that calls it around the calls of its layers."""

    def __init__(self, preserve_rng_state: bool) -> None:
        self._preserve = preserve_rng_state

    def __call__(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        from smp_runtime.activations.functional import checkpoint

        for ignored in ("use_reentrant", "preserve_rng_state"):
            kwargs.pop(ignored, None)
        owner = getattr(function, "__self__", None)
        is_call = getattr(function, "__name__", "") in ("__call__", "forward", "_call_impl", "_wrapped_call_impl")
        module = owner if is_call and isinstance(owner, nn.Module) else function
        return checkpoint(module, *args, preserve_rng_state=self._preserve, **kwargs)
