"""Modules that PyTorch's wrappers recompute in backward: what they get, and where their inputs wait.

A script wraps blocks by ``checkpoint_wrapper``, and the model by ``offload_wrapper``. PyTorch copies what such a model keeps to CPU
memory and back when it is needed, and computing waits for both. With ``sm_activation_offloading`` the inputs of recomputed modules
leave while others compute, and come back ahead of use; all else stays on the device.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch.utils import checkpoint as checkpointing

from smp_runtime.activations.activations import Activations
from smp_runtime.activations.caches import without_caches
from smp_runtime.activations.offloading import Offloader
from smp_runtime.activations.regions import run_region
from smp_runtime.tensors.torch_private import activation_wrappers

if TYPE_CHECKING:
    from smp_config.version2.parameters import Version2Parameters
    from smp_runtime.job.ranks import Ranks

#: Arguments of PyTorch's function that a region has, too. Others choose what is recomputed, and stay PyTorch's.
_KNOWN = {"use_reentrant", "preserve_rng_state"}


class OffloadedInputs(threading.local):
    """The inputs of recomputed modules of one rank, which wait in CPU memory.

    Attributes:
        is_on: whether this thread is in the forward pass of a model that ``offload_wrapper`` has wrapped.
    """

    def __init__(self, activations: Activations, offloader: Offloader) -> None:
        self.activations, self.offloader = activations, offloader
        self.is_on = False

    @classmethod
    def of(cls, ranks: Ranks, horizon: int) -> OffloadedInputs:
        """Return the inputs of the running job."""
        return ranks.keep(cls, lambda: cls._make(ranks, horizon))

    @classmethod
    def _make(cls, ranks: Ranks, horizon: int) -> OffloadedInputs:
        activations = Activations(ranks)
        offloader = Offloader(horizon, ranks.device, lambda: ((None, ()), None, None))
        activations.offloader = offloader
        return cls(activations, offloader)

    def call(self, module: Any, *args: Any, **kwargs: Any) -> Any:
        """Call a model, and let the inputs of its recomputed modules leave the device."""
        if self.is_on:  # a wrapped part of a wrapped model
            return module(*args, **kwargs)
        if self.offloader.is_idle:
            self.offloader.begin_step()
        self.is_on = True
        try:
            return module(*args, **kwargs)
        finally:
            self.is_on = False

    def run(self, wrapper: Any, *args: Any, **kwargs: Any) -> Any:
        """Call a module that backward runs again from inputs that come back."""
        keywords = wrapper.checkpoint_fn.keywords
        return run_region(
            next(wrapper.children()),
            args,
            kwargs,
            self.activations,
            preserve_rng_state=keywords.get("preserve_rng_state", True),
            label=_name_of(wrapper),
        )


def install(parameters: Version2Parameters, ranks: Ranks) -> Callable[[], None]:
    """Keep caches of keys and values from recomputed modules, and let their inputs leave; return the function that ends it.

    Scripts wrap modules before or after, and other libraries have PyTorch's function already: so the wrappers' forward passes are
    replaced, and the function where scripts take it by its module.
    """
    wrappers = activation_wrappers()
    kind, offloading = wrappers.CheckpointWrapper, wrappers.OffloadWrapper
    forward, plain_offload, original = kind.forward, offloading.forward, checkpointing.checkpoint
    inputs, is_split = None, parameters.tensor_parallel_degree > 1
    if parameters.sm_activation_offloading:
        inputs = OffloadedInputs.of(ranks, parameters.activation_loading_horizon)

    @functools.wraps(forward)
    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        __tracebackhide__ = True  # reports name the caller
        if not _recomputes():
            return forward(self, *args, **kwargs)
        if inputs is not None and inputs.is_on and _is_plain(self):
            return inputs.run(self, *args, **kwargs)
        args, kwargs = without_caches(self, args, kwargs, _name_of(self))
        return _run_again(self, args, kwargs) if is_split and _is_plain(self) else forward(self, *args, **kwargs)

    @functools.wraps(plain_offload)
    def offload(self: Any, *args: Any, **kwargs: Any) -> Any:
        __tracebackhide__ = True  # reports name the caller
        if inputs is None or not _recomputes() or not any(isinstance(part, kind) for part in self.modules()):
            return plain_offload(self, *args, **kwargs)
        return inputs.call(next(self.children()), *args, **kwargs)

    kind.forward, offloading.forward, checkpointing.checkpoint = run, offload, _make_function(original)

    def end() -> None:
        kind.forward, offloading.forward, checkpointing.checkpoint = forward, plain_offload, original

    return end


def _make_function(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``torch.utils.checkpoint.checkpoint`` without caches among the arguments."""

    @functools.wraps(original)
    def checkpoint(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        __tracebackhide__ = True  # reports name the caller
        if _recomputes():
            args, kwargs = without_caches(function, args, kwargs)
        return original(function, *args, **kwargs)

    return checkpoint


def _run_again(wrapper: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call a module with split parts that backward runs again.

    Its results may have one that is gathered only when the code around reads it, which PyTorch's reentrant way does not bear.
    """
    return wrapper.checkpoint_fn(next(wrapper.children()), *args, **{**kwargs, "use_reentrant": False})


def _recomputes() -> bool:
    """Return whether backward will run a module again; the compiler follows PyTorch's own function."""
    return torch.is_grad_enabled() and not torch.compiler.is_compiling()


def _is_plain(wrapper: Any) -> bool:
    """Return whether a wrapper recomputes all of its module, by PyTorch's function."""
    function = wrapper.checkpoint_fn
    is_own = function.func is activation_wrappers().torch_utils_checkpoint
    return bool(is_own and function.keywords.keys() <= _KNOWN)


def _name_of(wrapper: Any) -> str:
    """Return the type of the module in a wrapper, which FSDP may have wrapped, too."""
    inside = wrapper
    for module in wrapper.modules():
        inside = module
        if type(module).__module__.split(".")[0] != "torch":
            break
    return type(inside).__name__
