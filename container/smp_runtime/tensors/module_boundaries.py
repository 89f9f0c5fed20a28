"""Boundaries between modules in autograd's graph: they show which module's code a backward pass runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from smp_runtime.tensors.lazy_tensor import LazyTensor
from smp_runtime.tensors.nested import tensors_in


class ModuleBoundaries:
    """Hooks on nodes of the graph that report when a backward pass reaches the output of a module.

    Backward goes through a graph against the order in which it was made. From the node of a module's output it
    runs that module's code. From the node of a module's input it runs the code that made this input.

    Args:
        name: of the user of the hooks; for each name, a node has one owner.
        reached: called with the owner of the node, on the thread that runs backward.
    """

    def __init__(self, name: str, reached: Callable[[Any], None]) -> None:
        self._name = f"smp.{name}"
        self._reached = reached

    def note(self, value: Any, owner: Any) -> None:
        """Assign tensors to an owner, except those that have one: the module that made them came first.

        Args:
            value: of any structure. Lazy tensors are left out: their nodes compute nothing.
        """
        for tensor in tensors_in(value):
            if isinstance(tensor, LazyTensor):
                continue
            node: Any = tensor.grad_fn
            if node is None or self._name in node.metadata:
                continue
            node.metadata[self._name] = owner
            node.register_prehook(lambda gradients: self._reached(owner))
