"""Running an ``nn.Sequential`` in regions."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from smp_runtime.activations.activations import Activations
from smp_runtime.activations.regions import is_off, run_region
from smp_runtime.activations.strategies import Strategy, grouped

if TYPE_CHECKING:
    from torch import nn


def run_sequential(module: nn.Sequential, value: Any, strategy: Strategy, preserve_rng_state: bool) -> Any:
    """What ``module(value)`` gives, each group of children as one region on the stage where it lies.

    Raises:
        SMPUserError: a child is on several stages that were set by hand.
    """
    children = list(module)
    if is_off():
        return _chain(children, value)
    here = Activations.here()
    placement = here.placement
    stages = [0 if placement is None else placement.stage_of(child) for child in children]
    for stage, members in grouped(children, stages, strategy):
        if placement is not None and stage is None:
            placement.tell_split(members[0])
            value = members[0](value)
        elif placement is not None and stage != placement.stage:
            value = placement.call(members, (value,), {}, preserve_rng_state)
        else:
            chain = functools.partial(_chain, members)
            label = " + ".join(type(member).__name__ for member in members[:3])
            value = run_region(chain, (value,), {}, here, preserve_rng_state=preserve_rng_state, label=label)
    return value


def _chain(members: Sequence[nn.Module], value: Any) -> Any:
    for member in members:
        value = member(value)
    return value
