"""``checkpoint`` and ``checkpoint_sequential``: regions that a model's own forward asks for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from smp_runtime.activations.activations import Activations
from smp_runtime.activations.marking import check_sequential
from smp_runtime.activations.regions import is_off, run_region
from smp_runtime.activations.sequential import run_sequential
from smp_runtime.activations.strategies import Strategy
from smp_runtime.errors import SMPUserError


def checkpoint(module: Callable[..., Any], *args: Any, preserve_rng_state: bool = True, **kwargs: Any) -> Any:
    """Call a module and keep only its inputs for backward, which calls it again.

    Args:
        module: a module, or any function that calls no module of another pipeline stage. A module that lies on another
            stage is checkpointed there; one that is split over stages runs without checkpointing.
        preserve_rng_state: whether the second call draws the random numbers of the first.

    Raises:
        SMPUserError: nothing that can be called, or a module that is split over stages that were set by hand.
    """
    if not callable(module):
        raise SMPUserError(
            f"checkpoint got {module!r}, a {type(module).__name__}, to call; pass the module first and its arguments after it: "
            "checkpoint(self.layer, x)"
        )
    if is_off():
        return module(*args, **kwargs)
    here = Activations.here()
    if here.placement is not None and isinstance(module, nn.Module):
        stage = here.placement.stage_of(module)
        if stage is None:
            here.placement.tell_split(module)
            return module(*args, **kwargs)
        if stage != here.placement.stage:
            return here.placement.call([module], args, kwargs, preserve_rng_state)
    name = type(module).__name__ if isinstance(module, nn.Module) else getattr(module, "__name__", "function")
    return run_region(module, args, kwargs, here, preserve_rng_state=preserve_rng_state, label=name)


def checkpoint_sequential(
    sequential_module: nn.Sequential,
    input: Any,
    strategy: str = "each",
    preserve_rng_state: bool = True,
    pack_args_as_tuple: bool = False,
) -> Any:
    """Call an ``nn.Sequential`` whose children keep only their inputs for backward.

    Args:
        sequential_module: its children may lie on several pipeline stages, but each on one.
        input: of the first child; a tuple is one argument, as without checkpointing.
        strategy: ``"each"``, ``"contiguous"`` or ``"group_N"``, see :func:`.set_activation_checkpointing`.
        preserve_rng_state: whether the second call draws the random numbers of the first.
        pack_args_as_tuple: accepted; a tuple always stays one.

    Raises:
        SMPUserError: an unknown strategy, or no ``nn.Sequential``.
    """
    how = Strategy.parse(strategy)
    check_sequential(sequential_module, how)
    return run_sequential(sequential_module, input, how, preserve_rng_state)
