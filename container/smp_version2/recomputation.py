"""What PyTorch's activation checkpointing must leave out when it runs a module again in backward."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.utils import checkpoint as checkpointing

from smp_runtime.activations.caches import without_caches
from smp_runtime.tensors.torch_private import activation_wrappers


def install() -> Callable[[], None]:
    """Keep caches of keys and values from checkpointed modules; return the function that ends it.

    Scripts wrap modules before or after, and other libraries have PyTorch's function already: so the wrapper's forward pass is
    replaced, and the function where scripts take it by its module.
    """
    wrapper = activation_wrappers().CheckpointWrapper
    forward, original = wrapper.forward, checkpointing.checkpoint

    @functools.wraps(forward)
    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        if _recomputes():
            args, kwargs = without_caches(self, args, kwargs, _name_of(self))
        return forward(self, *args, **kwargs)

    @functools.wraps(original)
    def checkpoint(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if _recomputes():
            args, kwargs = without_caches(function, args, kwargs)
        return original(function, *args, **kwargs)

    wrapper.forward, checkpointing.checkpoint = run, checkpoint

    def end() -> None:
        wrapper.forward, checkpointing.checkpoint = forward, original

    return end


def _recomputes() -> bool:
    """Return whether backward will run a module again; the compiler follows PyTorch's own function."""
    return torch.is_grad_enabled() and not torch.compiler.is_compiling()


def _name_of(wrapper: Any) -> str:
    """Return the type of the module in a wrapper, which FSDP may have wrapped, too."""
    inside = wrapper
    for module in wrapper.modules():
        inside = module
        if type(module).__module__.split(".")[0] != "torch":
            break
    return type(inside).__name__
