"""Whose code a backward pass runs: nodes of autograd's graph that stand where one module ends and another begins."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from smp_runtime.tensors.lazy_tensor import LazyTensor
from smp_runtime.tensors.nested import tensors_in


class ModuleBoundaries:
    """Tells when a backward pass comes to what a module has made.

    Backward goes through a graph against the order in which it was made. So from the node of what a module returned on it runs
    that module's code, and from the node of what the module was given that of whoever made it.

    Args:
        name: of who asks; a node has one owner for each.
        reached: called on the thread that runs backward, with the owner of what it comes to.
    """

    def __init__(self, name: str, reached: Callable[[Any], None]) -> None:
        self._name = f"smp.{name}"
        self._reached = reached

    def note(self, value: Any, owner: Any) -> None:
        """These tensors are of an owner, unless one is known: who made them was there first.

        Args:
            value: of any structure. Tensors whose elements are yet to come are left out: their nodes compute nothing.
        """
        for tensor in tensors_in(value):
            node: Any = None if isinstance(tensor, LazyTensor) else tensor.grad_fn
            if node is not None and self._name not in node.metadata:
                node.metadata[self._name] = owner
                node.register_prehook(lambda gradients: self._reached(owner))
