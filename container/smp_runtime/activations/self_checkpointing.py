"""Layers that checkpoint themselves, as those of Transformers do after ``gradient_checkpointing_enable()``.

Such a layer wraps its own call on the side of the caller, which may be another stage than the one that runs it. Here the
layer keeps what it prepares for a checkpointed call (it drops caches), but the call itself passes, and the layer is
checkpointed where it runs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

FLAG, FUNCTION = "gradient_checkpointing", "_gradient_checkpointing_func"


def checkpoints_itself(module: nn.Module) -> bool:
    """Whether a module has a call of its own that looks at ``gradient_checkpointing``."""
    return hasattr(type(module), FLAG) and type(module).__call__ is not nn.Module.__call__


def let_pass(module: nn.Module) -> None:
    """A layer that is checkpointed here prepares for it, but does not do it itself."""
    if checkpoints_itself(module):
        module.__dict__[FLAG] = True
        module.__dict__[FUNCTION] = passes


def passes(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Stands for the layer's checkpointing function: calls what it is given."""
    # The layer has dropped caches among keyword arguments; a cache would be written a second time in backward.
    return function(*(None if _is_cache(value) else value for value in args), **kwargs)


def _is_cache(value: Any) -> bool:
    return any(kind.__module__ == "transformers.cache_utils" for kind in type(value).__mro__)
