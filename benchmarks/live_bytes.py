"""Bytes of tensors that are alive, counted at every operation: what autograd keeps, besides parameters and gradients."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterable, Iterator

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):
    """Counts the storages that operations on the calling thread make, until they are freed.

    Args:
        parameters: they and their gradients are not counted.

    Attributes:
        now: bytes alive, with gradients.
        peak: the most that were alive at once.
        recomputed: bytes alive after each recomputation of a region, when backward goes on.
    """

    def __init__(self, parameters: Iterable[torch.Tensor] = ()) -> None:
        super().__init__()
        self.now = self.peak = 0
        self.recomputed: list[int] = []
        self._parameters = list(parameters)
        self._seen = {tensor.untyped_storage()._cdata for tensor in self._parameters}
        self._is_armed = False

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if self._is_armed:
            self._is_armed = False
            gradients = sum(p.grad.nbytes for p in self._parameters if p.grad is not None)
            self.recomputed.append(self.now - gradients)
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor) and not leaf.is_meta:  # which has a size, but no memory
                self._add(leaf.untyped_storage())
        return result

    def _add(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key in self._seen:
            return
        self._seen.add(key)
        self.now += size
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._gone, key, size)

    def _gone(self, key: int, size: int) -> None:
        self._seen.discard(key)
        self.now -= size

    @contextlib.contextmanager
    def watching_regions(self) -> Iterator[None]:
        """Note, inside, how much is alive after every recomputation."""
        from smp_runtime.activations.regions import _Region

        again = _Region._again

        def noted(region):
            try:
                return again(region)
            finally:
                self._is_armed = True

        _Region._again = noted
        try:
            yield
        finally:
            _Region._again = again

    @contextlib.contextmanager
    def watching_tasks(self) -> Iterator[None]:
        """Count, inside, what the tasks of a pipeline's stage make, each on a thread of its own."""
        from smp_runtime.pipeline.execution.task_scheduler import TaskScheduler

        raised_by = TaskScheduler._raised_by

        def counted(scheduler, task):
            with self:
                return raised_by(scheduler, task)

        TaskScheduler._raised_by = counted
        try:
            yield
        finally:
            TaskScheduler._raised_by = raised_by
