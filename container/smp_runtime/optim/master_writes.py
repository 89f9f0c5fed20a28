"""Writes by a script, or by a method of the inner optimizer, into the tensors that are updated instead of parameters."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from smp_runtime.parameters.optimizer_shards import store_all
from smp_runtime.parameters.watched_values import WatchedValues, note_values
from smp_runtime.tensors.parameter_attributes import get_gradient, own, owner_of, set_gradient
from smp_runtime.tensors.torch_private import DisableTorchFunctionSubclass

if TYPE_CHECKING:
    import torch
    from torch import nn

    from smp_runtime.parameters.optimizer_shards import OptimizerShard


class MasterWrites:
    """Watches the optimizer shards that have storage of their own, or a part of a parameter.

    A script finds them in the optimizer's parameter groups. Their gradients are brought to them at the update; one that is read
    or set before is brought then.

    Args:
        bring: a method that brings all gradients; held weakly, with its object.
    """

    def __init__(self, bring: Callable[[], None]) -> None:
        # Weak, since the optimizer holds this object: a cycle would keep its memory until the garbage collector runs.
        self._bring = weakref.WeakMethod(bring)
        self._watched: dict[int, OptimizerShard] = {}
        self._is_ignored = False

    def watch(self, shard: OptimizerShard) -> None:
        """Watch an optimizer shard for writes from now on."""
        if shard.optimized is not shard.parameter:
            own(shard.optimized, WatchedValues(shard.optimized, self))
            self._watched[id(shard.optimized)] = shard

    def read(self, parameter: nn.Parameter) -> torch.Tensor | None:
        """Return the gradient of an optimizer shard, brought to it if it was not yet."""
        self._bring_to(parameter)
        return get_gradient(parameter)

    def write(self, parameter: nn.Parameter, value: torch.Tensor | None) -> None:
        """Set the gradient of an optimizer shard, after the model's were brought: they do not come again."""
        self._bring_to(parameter)
        set_gradient(parameter, value)

    @contextlib.contextmanager
    def ignored(self) -> Iterator[None]:
        """Let the library or the inner optimizer read and set gradients as they are inside the block."""
        before, self._is_ignored = self._is_ignored, True
        try:
            yield
        finally:
            self._is_ignored = before

    def note(self) -> None:
        """Record the current values of optimizer shards, after an update."""
        # So that the library's own reading does not count as the script's.
        with DisableTorchFunctionSubclass():
            for shard in self._watched.values():
                values = owner_of(shard.optimized)
                if isinstance(values, WatchedValues):
                    values.note_plain(shard.optimized)

    def store(self) -> bool:
        """Write changed optimizer shards into the model; return whether any has changed."""
        with DisableTorchFunctionSubclass():
            changed = [shard for shard in self._watched.values() if _is_changed(shard)]
        store_all(changed)
        for shard in changed:
            note_values(shard.optimized)
        return bool(changed)

    def _bring_to(self, parameter: nn.Parameter) -> None:
        if self._is_ignored:
            return
        shard = self._watched.get(id(parameter))
        if shard is None:
            return
        has_gradient_to_come = shard.gradient is not None and get_gradient(parameter) is None
        if not has_gradient_to_come:
            return
        bring = self._bring()  # None if the optimizer is gone: the reference is weak
        if bring is not None:
            bring()


def _is_changed(shard: OptimizerShard) -> bool:
    values = owner_of(shard.optimized)
    return isinstance(values, WatchedValues) and values.is_changed(shard.optimized)
