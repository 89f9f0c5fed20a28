"""Handles: tensors whose elements are still on their way, or not even asked for.

A handle has the shape and type of a tensor that another stage makes. Handed on to a module of a third stage, it
travels as a name, and the data goes directly to where it is used. The first operation that needs its elements
fetches them, and from then on works with a plain tensor.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import torch

from smp_runtime.tensors.torch_private import DisableTorchFunctionSubclass, make_without_elements, tree_map

#: Call numbers from the step function down: ``(2, 0)`` is the first remote call inside the third one.
Path = tuple[int, ...]


#: ``(kind, microbatch, path, index)``. Kinds: ``A`` argument of a call, ``F`` output of its forward, ``G`` gradient of
#: an output, handed over by the caller, ``B`` gradient of an argument.
Name = tuple[str, int, Path, int]


class Meta(NamedTuple):
    """A tensor without its elements."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: str
    requires_grad: bool

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Meta:
        """What a tensor is without its elements."""
        return cls(tuple(tensor.shape), tensor.dtype, tensor.device.type, tensor.requires_grad)


class Fetcher(Protocol):
    """Gets the elements of a value."""

    def fetch(self, name: Name, owner: int) -> torch.Tensor:
        """The value that stage ``owner`` has under a name; waited for if need be."""


class Handle(torch.Tensor):
    """A tensor by name.

    Attributes:
        value_name: under which its owner keeps the elements.
        owner: stage that has them, or will.
        touched: whether its elements were needed on this rank.
        needed: called with a stage that needs its elements; None where nobody learns from it.
    """

    value_name: Name
    owner: int
    touched: bool
    needed: Callable[[int], None] | None
    _fetcher: Fetcher
    _plain: torch.Tensor | None
    _plain_version: int
    _retains: bool

    @staticmethod
    def __new__(cls, fetcher: Fetcher, name: Name, owner: int, meta: Meta, device: torch.device) -> Handle:
        """A handle that is a tensor of ``meta``'s shape and type."""
        where = device if meta.device == device.type else torch.device(meta.device)
        handle: Handle = make_without_elements(cls, meta.shape, dtype=meta.dtype, device=where)
        handle.value_name = name
        handle.owner = owner
        handle.touched = False
        handle.needed = None
        handle._fetcher = fetcher
        handle._plain = None
        handle._plain_version = 0
        handle._retains = False
        return handle

    def plain(self) -> torch.Tensor:
        """The tensor itself, fetched if need be, with this handle's place in the graph."""
        if self._plain is None or (self.requires_grad and torch.is_grad_enabled() and not self._plain.requires_grad):
            is_changed = self._is_changed
            self._plain = _Fetch.apply(self) if self.requires_grad and torch.is_grad_enabled() else self.elements()
            self._plain_version = -1 if is_changed else self._plain._version
            if self._retains and self._plain.requires_grad:
                self._plain.retain_grad()
        return self._plain

    @property
    def fetched(self) -> torch.Tensor | None:
        """The plain tensor, if it was needed on this rank."""
        return self._plain

    def elements(self) -> torch.Tensor:
        """The elements, without a place in the graph."""
        self.touched = True
        return self._fetcher.fetch(self.value_name, self.owner).detach()

    def unchanged(self) -> torch.Tensor:
        """The handle, or the plain tensor if that was changed in place since it was fetched."""
        return self.plain() if self._is_changed else self

    @property
    def _is_changed(self) -> bool:
        return self._plain is not None and self._plain._version != self._plain_version

    def in_graph(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Hooks, gradients and flags belong to the handle, where gradients of all its uses come together.

        Once its plain tensor was changed in place, they belong to that, as in one process.
        """
        target = self.unchanged()
        with DisableTorchFunctionSubclass():
            result = func(target, *args, **kwargs)
            if target is self and func is torch.Tensor.retain_grad:
                self._retains = True  # the gradient of the newest version, should it be changed in place
                if self._plain is not None and self._plain.requires_grad:
                    self._plain.retain_grad()
            elif target is self and func is torch.Tensor.detach_ and self._plain is not None:
                self._plain.detach_()
        return self if result is target else result

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in NEEDS_NO_ELEMENTS:
            with DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        if func in OF_ITS_PLACE and isinstance(args[0], Handle):
            return args[0].in_graph(func, args[1:], kwargs)
        if func in _GRADIENTS_OF:
            return _gradients(func, args, kwargs)
        if func in _LIKE and isinstance(args[0], Handle):
            like = args[0]
            return _LIKE[func](tuple(like.shape), **{"dtype": like.dtype, "device": like.device, **kwargs})
        args, kwargs = tree_map(_plain_of, (args, kwargs))
        return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        # Reached past __torch_function__, for example when autograd adds up gradients.
        args, kwargs = tree_map(_elements_of, (args, kwargs or {}))
        return func(*args, **kwargs)

    def __repr__(self) -> str:  # type: ignore[override]
        return f"Handle({self.value_name}, stage={self.owner})"


class _Fetch(torch.autograd.Function):
    """From a handle to its elements; gradients pass."""

    @staticmethod
    def forward(ctx: Any, handle: Handle) -> torch.Tensor:
        return handle.elements()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient


def _gradients(func: Any, args: Any, kwargs: Any) -> Any:
    """Gradients of handles are those of all their uses, also where they were handed on by name."""
    asked = _GRADIENTS_OF[func]
    args = [tree_map(_newest_of if place == asked else _plain_of, each) for place, each in enumerate(args)]
    kwargs = {key: tree_map(_newest_of if key == "inputs" else _plain_of, each) for key, each in kwargs.items()}
    with DisableTorchFunctionSubclass():
        return func(*args, **kwargs)


def _newest_of(leaf: Any) -> Any:
    return leaf.unchanged() if isinstance(leaf, Handle) else leaf


def _plain_of(leaf: Any) -> Any:
    return leaf.plain() if isinstance(leaf, Handle) else leaf


def _elements_of(leaf: Any) -> Any:
    return leaf.elements() if isinstance(leaf, Handle) else leaf


def _methods(names: str) -> list[Any]:
    return [getattr(torch.Tensor, name) for name in names.split()]


def _getters(names: str) -> list[Any]:
    return [attribute.__get__ for attribute in _methods(names)]


#: What can be answered from shape, type and place in the graph; of a stand-in for a tensor of another stage, too.
NEEDS_NO_ELEMENTS = {
    *_getters("shape dtype device requires_grad grad_fn ndim is_leaf layout itemsize nbytes output_nr"),
    *_getters("is_cuda is_meta is_sparse is_quantized is_nested is_cpu is_mps is_xla"),
    *_getters("_version"),  # of the handle; what a module changes in place is the plain tensor
    *_methods("size dim ndimension numel nelement element_size is_floating_point is_complex"),
    *_methods("__len__ __hash__ get_device"),
    *(torch.is_floating_point, torch.is_complex, torch.is_tensor, torch.numel),
}

#: What concerns a tensor's place in the graph: done to the handle, whose elements nobody needs for it.
OF_ITS_PLACE = {
    *_methods("register_hook register_post_accumulate_grad_hook retain_grad detach_ requires_grad_"),
    *_getters("retains_grad grad"),
    *(attribute.__set__ for attribute in _methods("requires_grad grad")),
    torch.Tensor.grad.__delete__,  # type: ignore[union-attr]
}

#: With the place of the tensors among the arguments whose gradients are asked for.
_GRADIENTS_OF = {torch.autograd.grad: 1, torch.Tensor.backward: 4}

#: Made from shape and type alone. PyTorch names its own functions, whoever has wrapped them.
_LIKE: dict[Any, Any] = {
    inspect.unwrap(like): make
    for like, make in ((torch.ones_like, torch.ones), (torch.zeros_like, torch.zeros), (torch.empty_like, torch.empty))
}
