"""Tensors that get their elements on first use; until then they have a shape, a type and a place in the graph.

The first operation that needs the elements gets them, and from then on works with a plain tensor.
"""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

import torch

from smp_runtime.tensors.torch_private import DisableTorchFunctionSubclass, make_without_elements, tree_map

if TYPE_CHECKING:
    from typing_extensions import Self


class LazyTensor(torch.Tensor):
    """A tensor without elements; a subclass gets them in :meth:`elements`."""

    _plain: torch.Tensor | None
    _plain_version: int
    _retains: bool

    @classmethod
    def like(cls, shape: Any, dtype: torch.dtype, device: torch.device) -> Self:
        """Create a tensor of this class with the given shape and type, without elements."""
        made: Self = make_without_elements(cls, shape, dtype=dtype, device=device)
        made._plain = None
        made._plain_version = 0
        made._retains = False
        return made

    def elements(self) -> torch.Tensor:
        """Return the elements as a tensor without a place in the graph."""
        raise NotImplementedError

    def plain(self) -> torch.Tensor:
        """Return the plain tensor with this tensor's place in the graph; get the elements if needed."""
        needs_graph = self.requires_grad and torch.is_grad_enabled()
        former = self._plain
        if former is not None and (former.requires_grad or not needs_graph):
            return former
        is_changed = self._is_changed
        if needs_graph:
            plain = _Elements.apply(self)
        else:
            plain = self.elements()
        self._plain = plain
        self._plain_version = -1 if is_changed else plain._version
        if self._retains and plain.requires_grad:
            plain.retain_grad()
        return plain

    def unchanged(self) -> torch.Tensor:
        """Return this tensor, or the plain one if that was changed in place since it was made."""
        return self.plain() if self._is_changed else self

    @property
    def _is_changed(self) -> bool:
        return self._plain is not None and self._plain._version != self._plain_version

    def in_graph(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Apply a function about hooks, gradients or flags to this tensor, where gradients of all its uses meet.

        Once its plain tensor was changed in place, apply it to that one, as in one process.
        """
        target = self.unchanged()
        with DisableTorchFunctionSubclass():
            result = func(target, *args, **kwargs)
            if target is self:
                self._repeat_on_plain(func)
        return self if result is target else result

    def _repeat_on_plain(self, func: Any) -> None:
        """Let the plain tensor retain its gradient, or leave the graph, as this tensor does."""
        plain = self._plain
        if func is torch.Tensor.retain_grad:
            self._retains = True  # the gradient of the newest version, should it be changed in place
            if plain is not None and plain.requires_grad:
                plain.retain_grad()
        elif func is torch.Tensor.detach_ and plain is not None:
            plain.detach_()

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in NEEDS_NO_ELEMENTS:
            with DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        if func in OF_ITS_PLACE and isinstance(args[0], LazyTensor):
            return args[0].in_graph(func, args[1:], kwargs)
        # Context parallelism wraps one of them.
        if (unwrapped := getattr(func, "__wrapped__", func)) in _GRADIENTS_OF:
            return _gradients(func, args, kwargs, _GRADIENTS_OF[unwrapped])
        if func in _LIKE and isinstance(args[0], LazyTensor):
            like = args[0]
            return _LIKE[func](tuple(like.shape), **{"dtype": like.dtype, "device": like.device, **kwargs})
        args, kwargs = tree_map(plain_of, (args, kwargs))
        return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        # Reached past __torch_function__, for example when autograd adds up gradients.
        args, kwargs = tree_map(_elements_of, (args, kwargs or {}))
        return func(*args, **kwargs)


class _Elements(torch.autograd.Function):
    """The function from a tensor to its elements; gradients pass through."""

    @staticmethod
    def forward(ctx: Any, later: LazyTensor) -> torch.Tensor:
        return later.elements()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient


def _gradients(func: Any, args: Any, kwargs: Any, asked: int) -> Any:
    """Ask for gradients of lazy tensors themselves: they sum all uses, also those without elements.

    Args:
        asked: the position of the argument that lists the tensors to differentiate by.
    """
    given = []
    for place, each in enumerate(args):
        change = _newest_of if place == asked else plain_of
        given.append(tree_map(change, each))
    named = {}
    for key, each in kwargs.items():
        change = _newest_of if key == "inputs" else plain_of
        named[key] = tree_map(change, each)
    with DisableTorchFunctionSubclass():
        return func(*given, **named)


def _newest_of(leaf: Any) -> Any:
    return leaf.unchanged() if isinstance(leaf, LazyTensor) else leaf


def plain_of(leaf: Any) -> Any:
    """Return the plain tensor of a lazy one; return anything else unchanged."""
    return leaf.plain() if isinstance(leaf, LazyTensor) else leaf


def changes_in_place(name: str) -> bool:
    """Return whether a function of this name writes into its first argument."""
    if name in ("__setitem__", "__set__"):
        return True
    if name.startswith("__i") and name.endswith("__"):  # a += b
        return name not in _NOT_AUGMENTED
    return name.endswith("_") and not name.endswith("__")


def _elements_of(leaf: Any) -> Any:
    return leaf.elements() if isinstance(leaf, LazyTensor) else leaf


def _methods(names: str) -> list[Any]:
    return [getattr(torch.Tensor, name) for name in names.split()]


def _getters(names: str) -> list[Any]:
    return [attribute.__get__ for attribute in _methods(names)]


#: Functions that need only shape, type and place in the graph. Stand-ins for tensors of other stages answer them, too.
NEEDS_NO_ELEMENTS = {
    *_getters("shape dtype device requires_grad grad_fn ndim is_leaf layout itemsize nbytes output_nr"),
    *_getters("is_cuda is_meta is_sparse is_quantized is_nested is_cpu is_mps is_xla"),
    *_getters("_version"),  # of the tensor without elements; modules change the plain tensor in place
    *_methods("size dim ndimension numel nelement element_size is_floating_point is_complex"),
    *_methods("__len__ __hash__ get_device"),
    *(torch.is_floating_point, torch.is_complex, torch.is_tensor, torch.numel),
}

#: What concerns a tensor's place in the graph: done to the tensor without its elements.
OF_ITS_PLACE = {
    *_methods("register_hook register_post_accumulate_grad_hook retain_grad detach_ requires_grad_"),
    *_getters("retains_grad grad"),
    *(attribute.__set__ for attribute in _methods("requires_grad grad")),
    torch.Tensor.grad.__delete__,  # type: ignore[union-attr]
}

#: Special methods that begin as ``__iadd__`` does, but change nothing in place.
_NOT_AUGMENTED = {"__index__", "__int__", "__invert__", "__iter__", "__init__"}

#: Backward passes, with the position of the argument that lists the tensors to differentiate by.
_GRADIENTS_OF = {torch.autograd.grad: 1, torch.Tensor.backward: 4}

#: Made from shape and type alone. These are PyTorch's own functions, also if other code has wrapped them.
_LIKE: dict[Any, Any] = {
    inspect.unwrap(like): make
    for like, make in ((torch.ones_like, torch.ones), (torch.zeros_like, torch.zeros), (torch.empty_like, torch.empty))
}
