"""Regions that a model's own forward asks for: ``checkpoint``, ``checkpoint_sequential`` and its strategies."""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from torch import nn

from smp_config.errors import kind_of
from smp_runtime.activations.activations import Activations
from smp_runtime.activations.regions import is_off, run_region
from smp_runtime.errors import SMPUserError

T = TypeVar("T")


def checkpoint(module: Callable[..., Any], *args: Any, preserve_rng_state: bool = True, **kwargs: Any) -> Any:
    """Call a module and keep only its inputs for backward, which calls it again.

    Args:
        module: a module, or any function that calls no module of another pipeline stage. A module that lies on another
            stage is checkpointed there; one that is split over stages runs without checkpointing.
        args, kwargs: what it is called with.
        preserve_rng_state: whether the second call draws the random numbers of the first.

    Returns:
        What the module returns.

    Raises:
        SMPUserError: nothing that can be called, or a module that is split over stages that were set by hand.

    Example:
        >>> from smdistributed.modelparallel.torch.patches.checkpoint import checkpoint
        >>> checkpoint(module, inputs).sum().backward()  # in the forward of a model
    """
    if not callable(module):
        raise SMPUserError(
            f"checkpoint got {module!r}, {kind_of(module)}, to call; pass the module first and its arguments after it: "
            "checkpoint(self.layer, x)",
            code="SMP309",
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
    """Call an ``nn.Sequential`` with children that keep only their inputs for backward.

    Args:
        sequential_module: its children may lie on several pipeline stages, but each on one.
        input: of the first child; a tuple is one argument, as without checkpointing.
        strategy: ``"each"``, ``"contiguous"`` or ``"group_N"``, see :func:`.set_activation_checkpointing`.
        preserve_rng_state: whether the second call draws the random numbers of the first.
        pack_args_as_tuple: accepted; a tuple always stays one.

    Returns:
        The output of the last child.

    Raises:
        SMPUserError: an unknown strategy, or a module that is not an ``nn.Sequential``.

    Example:
        >>> from smdistributed.modelparallel.torch.patches.checkpoint import checkpoint_sequential
        >>> layers = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
        >>> checkpoint_sequential(layers, inputs, strategy="contiguous").sum().backward()
    """
    how = Strategy.parse(strategy)
    return run_sequential(check_sequential(sequential_module, how), input, how, preserve_rng_state)


@dataclass(frozen=True)
class Strategy:
    """A checkpointing strategy."""

    name: str  # ``each``, ``contiguous`` or ``group_N``
    most: float  # most children in one region

    @classmethod
    def parse(cls, name: object) -> Strategy:
        """Return the strategy of this name.

        Raises:
            SMPUserError: If there is no such strategy.
        """
        if name == "each":
            return cls("each", 1)
        if name == "contiguous":
            return cls("contiguous", math.inf)
        number = re.fullmatch(r"group_(-?\d+)", name) if isinstance(name, str) else None
        if number is None:
            raise SMPUserError(
                f"strategy is {name!r}, which is none of the checkpointing strategies: use 'each' (every child on its own), "
                "'contiguous' (all neighbours on one partition together) or 'group_N' with a number, such as 'group_4'",
                code="SMP309",
            )
        if (most := int(number[1])) < 1:
            raise SMPUserError(
                f"strategy is {name!r}, but a region needs at least one child; use 'group_1' or more, or 'contiguous' for as many "
                "as possible",
                code="SMP309",
            )
        return cls(str(name), most)


def group_neighbours(
    children: Sequence[T], stages: Sequence[int | None], strategy: Strategy
) -> list[tuple[int | None, list[T]]]:
    """Group neighbours on the same stage into regions of at most the strategy's size.

    Args:
        children: in the order of their calls.
        stages: the stage of each; None for one that is not on a single stage, which stays alone.

    Returns:
        Stage and members of every region.
    """
    groups: list[tuple[int | None, list[T]]] = []
    for child, stage in zip(children, stages, strict=True):
        if groups and stage is not None and groups[-1][0] == stage and len(groups[-1][1]) < strategy.most:
            groups[-1][1].append(child)
        else:
            groups.append((stage, [child]))
    return groups


def check_sequential(module: nn.Module, strategy: Strategy) -> nn.Sequential:
    """Return the module if its children can be grouped.

    Raises:
        SMPUserError: If they cannot.
    """
    if not isinstance(module, nn.Sequential):
        raise SMPUserError(
            f"checkpointing with strategies needs an nn.Sequential, but got {kind_of(module)}; make the layers an "
            "nn.Sequential, or checkpoint them one by one",
            code="SMP309",
        )
    if strategy.most > 1 and type(module).forward is not nn.Sequential.forward:
        raise SMPUserError(
            f"strategy {strategy.name!r} puts children together, but {type(module).__name__} has a forward of its own, which "
            "calls them in its own way; use strategy 'each', or an nn.Sequential without it",
            code="SMP309",
        )
    return module


def run_sequential(module: nn.Sequential, value: Any, strategy: Strategy, preserve_rng_state: bool) -> Any:
    """Return ``module(value)``, with each group of children as one region on the stage where it lies.

    Raises:
        SMPUserError: a child is on several stages that were set by hand.
    """
    children = list(module)
    if is_off():
        return _chain(children, value)
    here = Activations.here()
    placement = here.placement
    stages = [0 if placement is None else placement.stage_of(child) for child in children]
    for stage, members in group_neighbours(children, stages, strategy):
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
