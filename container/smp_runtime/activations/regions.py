"""A region: a call that keeps only its inputs for backward, and is run again there.

The mechanism is PyTorch's checkpointing without re-entry. This module adds: arguments of any structure, with every
tensor kept under the key of its use (so that it can wait elsewhere, see :mod:`.offloading`); the random numbers of the
running task; buffers and parameters that the second run must not change; and a check that no module of another pipeline
stage is called inside.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from smp_runtime.activations.caches import without_caches
from smp_runtime.activations.offloading import Offloader, Stored
from smp_runtime.activations.region_buffers import RegionBuffers, modules_of
from smp_runtime.activations.region_parameters import RegionParameters
from smp_runtime.errors import SMPUserError
from smp_runtime.job import session as sessions
from smp_runtime.tensors.random_state import RandomState
from smp_runtime.tensors.remote_tensor import RemoteTensor
from smp_runtime.tensors.torch_private import TreeSpec, tree_flatten, tree_unflatten

if TYPE_CHECKING:
    from smp_runtime.activations.activations import Activations


class _RegionState(threading.local):
    """A flag for each thread: whether it runs inside a region; the outermost one counts."""

    inside = False


_here = _RegionState()


def is_off() -> bool:
    """Return whether a region has no effect now: no gradients, a tracing step, or inside another region."""
    return not torch.is_grad_enabled() or _here.inside or sessions.is_tracing()


def run_region(
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    activations: Activations,
    *,
    preserve_rng_state: bool = True,
    label: str = "",
) -> Any:
    """Call ``function(*args, **kwargs)`` and keep only its arguments; backward runs it again.

    Args:
        preserve_rng_state: whether the second run draws the random numbers of the first.
        label: for messages.

    Raises:
        SMPUserError: If a module of another pipeline stage was called inside, or a cache has tokens already.
    """
    if is_off():
        return function(*args, **kwargs)
    args, kwargs = without_caches(function, args, kwargs, label)
    activations.regions += 1
    leaves, structure = tree_flatten((args, kwargs))
    leaves = [leaf.plain() if isinstance(leaf, RemoteTensor) else leaf for leaf in leaves]
    region = _Region(function, leaves, structure, activations, preserve_rng_state, label)
    # Its own care for random numbers looks for devices among tensor arguments; this region has none.
    result = torch_checkpoint(region.run, use_reentrant=False, preserve_rng_state=False)
    region.forward_ended()
    return result


class _Region:
    """One use of a region.

    Attributes:
        stored: its arguments that are tensors.
        key: the use and its microbatch; only counted with an offloader.
        has_run: whether its forward pass has ended.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        leaves: list[Any],
        structure: TreeSpec,
        activations: Activations,
        preserve_rng_state: bool,
        label: str,
    ) -> None:
        self._function = function
        self._structure = structure
        self._activations = activations
        self._offloader: Offloader | None = activations.offloader
        self._label = label
        self._buffers = RegionBuffers(function)
        self._parameters = RegionParameters(modules_of(function), label)
        self._random = RandomState.of_now(activations.device_of(leaves)) if preserve_rng_state else None
        self._given: list[Any] | None = leaves
        keep = Stored if self._offloader is None else self._offloader.store
        self._leaves = [
            (keep(leaf), leaf.requires_grad) if isinstance(leaf, torch.Tensor) else (leaf, None) for leaf in leaves
        ]
        self.stored: list[Stored] = [kept for kept, needs in self._leaves if needs is not None]
        self.has_run = False
        self.key: Any = None
        if self._offloader is not None:
            self._offloader.forward_begins(self)

    def run(self) -> Any:
        """Run the region; PyTorch's checkpointing calls this in the forward pass, and again in backward."""
        if self._given is not None:
            leaves, self._given = self._given, None
            return self._forward(leaves)
        return self._again()

    def _forward(self, leaves: list[Any]) -> Any:
        calls = self._activations.remote_calls()
        args, kwargs = tree_unflatten(leaves, self._structure)
        del leaves
        result = self._inside(args, kwargs)
        self._buffers.forward_ended()
        self._parameters.forward_ended()
        if self._activations.remote_calls() != calls:
            raise SMPUserError(
                f"the checkpointed region {self._label!r} calls modules of other pipeline stages, and running it again in backward "
                "would call them again; checkpoint modules that lie on one stage as a whole, or keep these modules together "
                "with smp.set_partition",
                code="SMP309",
            )
        return result

    def forward_ended(self) -> None:
        """Record that the forward pass has ended, so the arguments are not needed before backward."""
        self.has_run = True
        if self._offloader is not None:
            self._offloader.forward_ended(self)

    def _again(self) -> Any:
        if self._offloader is not None:
            self._offloader.backward_begins(self)
        leaves = [
            kept if needs is None else kept.take(self._label).detach().requires_grad_(needs)
            for kept, needs in self._leaves
        ]
        args, kwargs = tree_unflatten(leaves, self._structure)
        del leaves
        with self._buffers.apart(), self._parameters.as_before():
            if self._random is None:
                return self._inside(args, kwargs)
            outside = RandomState.of_now(self._activations.device)
            self._random.restore()
            try:
                return self._inside(args, kwargs)
            finally:
                outside.restore()

    def _inside(self, args: Any, kwargs: Any) -> Any:
        _here.inside = True
        try:
            return self._function(*args, **kwargs)
        finally:
            _here.inside = False
