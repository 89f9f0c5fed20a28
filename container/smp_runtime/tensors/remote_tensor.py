"""Handles: tensors that have no elements yet, either on their way or not requested.

A handle has the shape and type of a tensor that another stage makes. If it is passed to a module of a third
stage, only its name is sent, and the data goes directly to the stage that uses it. The first operation that
needs its elements fetches them, and from then on works with a plain tensor.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol

import torch

from smp_runtime.tensors.lazy_tensor import LazyTensor

#: Call numbers from the step function down: ``(2, 0)`` is the first remote call inside the third one.
Path = tuple[int, ...]


#: ``(kind, microbatch, path, index)``. Kinds: ``A`` argument of a call, ``F`` output of its forward, ``G`` gradient of
#: an output, handed over by the caller, ``B`` gradient of an argument.
Name = tuple[str, int, Path, int]


class TensorMetadata(NamedTuple):
    """A tensor without its elements."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: str
    requires_grad: bool

    @classmethod
    def of(cls, tensor: torch.Tensor) -> TensorMetadata:
        """Return the metadata of a tensor."""
        return cls(tuple(tensor.shape), tensor.dtype, tensor.device.type, tensor.requires_grad)


class Fetcher(Protocol):
    """Gets the elements of a value."""

    def fetch(self, name: Name, owner: int) -> torch.Tensor:
        """Return the value that stage ``owner`` has under a name; wait for it if needed."""


class RemoteTensor(LazyTensor):
    """A tensor of another stage, known by name.

    Attributes:
        value_name: under which its owner keeps the elements.
        owner: stage that has them, or will.
        touched: whether its elements were needed on this rank.
        needed: called with a stage that needs its elements; None if there is no such callback.
    """

    value_name: Name
    owner: int
    touched: bool
    needed: Callable[[int], None] | None
    _fetcher: Fetcher

    @staticmethod
    def __new__(
        cls, fetcher: Fetcher, name: Name, owner: int, meta: TensorMetadata, device: torch.device
    ) -> RemoteTensor:
        """Create a handle of ``meta``'s shape and type."""
        where = device if meta.device == device.type else torch.device(meta.device)
        handle: RemoteTensor = cls.like(meta.shape, meta.dtype, where)
        handle.value_name = name
        handle.owner = owner
        handle.touched = False
        handle.needed = None
        handle._fetcher = fetcher
        return handle

    @property
    def fetched(self) -> torch.Tensor | None:
        """Return the plain tensor, or None if it was not needed on this rank."""
        return self._plain

    def elements(self) -> torch.Tensor:
        """Fetch the elements; return them without a place in the graph."""
        self.touched = True
        return self._fetcher.fetch(self.value_name, self.owner).detach()

    def __repr__(self) -> str:  # type: ignore[override]
        return f"Handle({self.value_name}, stage={self.owner})"
