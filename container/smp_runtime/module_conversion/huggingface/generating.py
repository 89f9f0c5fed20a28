"""``generate`` of a distributed language model: the original class's code in Transformers, with the model's forward."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from smp_runtime.errors import SMPUserError

if TYPE_CHECKING:
    from collections.abc import Callable


def generate_as(original: type, made: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Run ``original.generate(*args, **kwargs)`` on a model without weights; ``made`` answers its calls."""
    return _shell(original)(made).generate(*args, **kwargs)


@functools.cache
def _shell(original: Any) -> Callable[[nn.Module], Any]:
    """Return a class that generates like ``original``; its instances have a distributed model instead of layers."""

    class Shell(original):
        """A model that is called like the original, with the configuration of the distributed model."""

        def __init__(self, made: nn.Module) -> None:
            nn.Module.__init__(self)
            # Past nn.Module.__setattr__: it is no part of the shell.
            self.__dict__ |= {"answers": made, "training": made.training, "name_or_path": ""}
            self.__dict__ |= {name: getattr(made, name) for name in ("config", "generation_config")}

        @functools.wraps(original.forward)
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            return self.answers(*args, **kwargs)

        @property
        def device(self) -> torch.device:
            """Return the device for inputs."""
            return next(self.answers.parameters()).device

        @property
        def dtype(self) -> torch.dtype:
            """Return the dtype of the parameters."""
            return next(p.dtype for p in self.answers.parameters() if p.is_floating_point())

    Shell.__name__, Shell.__qualname__ = original.__name__, original.__qualname__
    return Shell


def past_length(cache: Any) -> int:
    """Return the number of tokens in a cache of Transformers; 0 for None.

    Raises:
        SMPUserError: it is not one that grows with the sequence.
    """
    if cache is None:
        return 0
    if not hasattr(cache, "update") or getattr(cache, "is_compileable", False):
        raise SMPUserError(
            f"a distributed model got past_key_values of type {type(cache).__name__}, but takes Transformers' DynamicCache, which "
            "generate() makes: leave out cache_implementation and past_key_values, or create the model outside of "
            "smp.tensor_parallelism()",
            code="SMP313",
        )
    return int(cache.get_seq_length())
