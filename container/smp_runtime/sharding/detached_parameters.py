"""Sharded parameters outside their use: a rank has its own part of the values, and nothing of the rest.

Until its unit is gathered a parameter is of the class :class:`DetachedParameter`. It has a shape, and takes no memory.
An operation that needs elements gets this rank's part of them, and NaN for the rest. So a script's elementwise writes
reach the shards of all ranks without any communication: each rank keeps its own part.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import nn

from smp_runtime.tensors.lazy_tensor import NEEDS_NO_ELEMENTS, OF_ITS_PLACE
from smp_runtime.tensors.nested import storage_of
from smp_runtime.tensors.parameter_attributes import get_data, get_gradient, owner_of, set_gradient
from smp_runtime.tensors.torch_private import DisableTorchFunctionSubclass, can_take_contents, tree_leaves, tree_map

if TYPE_CHECKING:
    from smp_runtime.parameters.watched_values import GradientSource

#: Autograd makes a view of a parameter to find its gradient's node; ``module.to()`` asks whether ``data`` can be set.
_WITHOUT_ELEMENTS = NEEDS_NO_ELEMENTS | OF_ITS_PLACE | {torch.Tensor.view_as, can_take_contents}


class GatheredUnit(Protocol):
    """Parameters that are gathered together.

    Attributes:
        is_touched: whether the script may have written into them without a change of any counter.
        writes: how many times values were written into them otherwise.
    """

    is_touched: bool
    writes: int

    @property
    def storage_key(self) -> int:
        """Return the key of the whole buffer's memory."""

    def reshard(self) -> None:
        """Keep this rank's part of values written into the whole, and free the whole."""

    def begin_repeat(self) -> None:
        """Begin a repetition of a forward pass, whose writes must be those of the first one."""

    def end_repeat(self) -> bool:
        """Return whether the repetition has written other values."""


class Shards(Protocol):
    """The sharded parameters of a model."""

    def unit_of(self, parameter: nn.Parameter) -> GatheredUnit:
        """Return the unit that a parameter is in."""

    def fill(self, unit: Any) -> bool:
        """Fill a unit's parameters with this rank's part of the values; return whether they had no memory."""

    def assign(self, parameter: nn.Parameter, value: torch.Tensor) -> None:
        """Take a parameter's whole value."""

    @property
    def is_running(self) -> bool:
        """Return whether a module call is running; it gathers the parameters that it needs."""

    def note_read(self) -> None:
        """Record that the script has read elements of a parameter that this rank has a part of."""


class DetachedParameter(nn.Parameter):
    """A sharded parameter of a unit that is not gathered."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(func, args, kwargs or {})


class DetachedValues(torch.Tensor):
    """``data`` of such a parameter; a write into it is a write into the parameter."""

    of: nn.Parameter

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(func, args, kwargs or {})


class ShardOwner:
    """Answers for ``data`` and ``grad`` of sharded parameters; holds neither them nor the shards."""

    def __init__(self, shards: Shards, gradients: GradientSource) -> None:
        self._shards = weakref.ref(shards)
        self._gradients = weakref.ref(gradients)

    @property
    def shards(self) -> Shards | None:
        """Return the shards, or None if the model has been freed."""
        return self._shards()

    def read_data(self, parameter: nn.Parameter) -> torch.Tensor:
        """Return the values, through which the script may write."""
        if isinstance(parameter, DetachedParameter):
            return _values_of(parameter)
        if (shards := self._shards()) is not None:
            shards.unit_of(parameter).is_touched = True
        return get_data(parameter)

    def write_data(self, parameter: nn.Parameter, value: torch.Tensor) -> None:
        """Keep this rank's part of a value."""
        shards = self._shards()
        is_own = value is parameter or (isinstance(value, DetachedValues) and value.of is parameter)
        if shards is not None and not is_own:
            shards.assign(parameter, value)

    def gathered_with(self, parameter: nn.Parameter) -> GatheredUnit | None:
        """Return the unit that the parameter is gathered with."""
        shards = self._shards()
        return None if shards is None else shards.unit_of(parameter)

    def read_gradient(self, parameter: nn.Parameter) -> torch.Tensor | None:
        """Return the whole gradient, gathered if it was reduced already."""
        gradients = self._gradients()
        return get_gradient(parameter) if gradients is None else gradients.read(parameter)

    def write_gradient(self, parameter: nn.Parameter, value: torch.Tensor | None) -> None:
        """Take a gradient that the script sets."""
        gradients = self._gradients()
        if gradients is None:
            set_gradient(parameter, value)
        else:
            gradients.write(parameter, value)


def show_detached(parameter: nn.Parameter) -> None:
    """Make a plain parameter a detached one; a parameter of another class stays as it is."""
    if type(parameter) is nn.Parameter and isinstance(owner_of(parameter), ShardOwner):
        parameter.__class__ = DetachedParameter


def show_attached(parameter: nn.Parameter) -> None:
    """Make it a plain parameter again."""
    if type(parameter) is DetachedParameter:
        object.__setattr__(parameter, "__class__", nn.Parameter)


def _values_of(parameter: nn.Parameter) -> DetachedValues:
    with DisableTorchFunctionSubclass():
        values = get_data(parameter).as_subclass(DetachedValues)
    values.of = parameter
    return values


def _run(func: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
    """Run a function of PyTorch on this rank's part of the values."""
    with DisableTorchFunctionSubclass():
        if func in _WITHOUT_ELEMENTS:
            return func(*args, **kwargs)
        if func is torch.Tensor.detach and isinstance(args[0], DetachedParameter):
            return _values_of(args[0])
        if func is torch.Tensor.to and func(*args, **kwargs) is args[0]:  # it is there already
            return args[0]
        writes, units = _writes(func, kwargs), list(_units_in((args, kwargs)))
        if not writes and any(shards.is_running for shards, _ in units):
            return func(*args, **kwargs)  # the module that uses it did not register it: NaN
        filled = [unit for shards, unit in units if shards.fill(unit)]
        args, kwargs = tree_map(_plain_of, (args, kwargs))
        try:
            result = func(*args, **kwargs)
        except BaseException:
            for unit in filled:
                unit.reshard()
            raise
        returned = {storage_of(leaf) for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)}
        for shards, unit in units:
            # The script can write into a result that shares the unit's memory, which changes no counter of the parameter.
            if writes or unit.storage_key in returned:
                unit.is_touched = True
                continue
            # The result has memory of its own, so nothing needs the filled values any more.
            shards.note_read()
            if unit in filled:
                unit.reshard()
    return result


def _units_in(values: Any) -> Iterator[tuple[Shards, GatheredUnit]]:
    for leaf in tree_leaves(values):
        parameter = leaf.of if isinstance(leaf, DetachedValues) else leaf
        if not isinstance(parameter, nn.Parameter):
            continue
        owner = owner_of(parameter)
        shards = None
        if isinstance(owner, ShardOwner):
            shards = owner.shards
        if shards is not None:
            yield shards, shards.unit_of(parameter)


def _plain_of(leaf: Any) -> Any:
    return get_data(leaf.of) if isinstance(leaf, DetachedValues) else leaf


def _writes(func: Callable[..., Any], kwargs: dict[str, Any]) -> bool:
    """Return whether a function may write into its arguments, by its name."""
    name = getattr(func, "__name__", "")
    if kwargs.get("out") is not None or name in ("__setitem__", "__set__"):
        return True
    if name.endswith("__"):
        return name.startswith("__i")
    return name.endswith("_")
