"""A context group whose ranks are threads of one process, for tests of what they compute, not of how it travels."""

from __future__ import annotations

import threading
import traceback
import types
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import torch.utils.checkpoint

from smp_runtime.context import (
    functions,
    rules,  # noqa: F401 - it registers them
)
from smp_runtime.context.exchange import ContextGroup
from smp_runtime.context.layout import zigzag
from smp_runtime.context.sequence import ShardedSequence

if TYPE_CHECKING:
    import pytest

_PATIENCE = 60.0


def see_sequences(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let PyTorch's functions see sequences during a test alone: other tests of the process have none."""
    of_checkpoints = torch.utils.checkpoint._CheckpointFrame
    replaced = (
        (torch.autograd, "grad"),
        (torch.autograd.Function, "apply"),
        (torch.nn.modules.module, "BackwardHook"),
        (torch.nn.Module, "_maybe_warn_non_full_backward_hook"),
        (of_checkpoints, "save_inputs"),
        (of_checkpoints, "get_inputs"),
    )
    for owner, name in replaced:
        monkeypatch.setattr(owner, name, vars(owner)[name])  # which is put back
    functions.install()


class _Ended:
    def wait(self) -> None:
        pass


class ThreadCollectives:
    """Collectives between threads."""

    def __init__(self, size: int) -> None:
        self._size, self._barrier = size, threading.Barrier(size, timeout=_PATIENCE)
        self._given: list[Any] = [None] * size
        self.here = threading.local()

    def _exchange(self, value: Any) -> list[Any]:
        self._given[self.here.rank] = value
        self._barrier.wait()
        everyone = list(self._given)
        self._barrier.wait()
        return everyone

    def all_gather(self, full: torch.Tensor, shard: torch.Tensor, group: object) -> _Ended:
        full.view(-1).copy_(torch.cat([part.reshape(-1) for part in self._exchange(shard.clone())]))
        return _Ended()

    def reduce_scatter(self, shard: torch.Tensor, full: torch.Tensor, group: object) -> _Ended:
        shard.copy_(torch.stack(self._exchange(full.clone())).sum(0).view(self._size, -1)[self.here.rank])
        return _Ended()

    def all_reduce(self, tensor: torch.Tensor, group: object) -> _Ended:
        tensor.copy_(torch.stack(self._exchange(tensor.clone())).sum(0))
        return _Ended()

    def all_to_all(
        self,
        received: torch.Tensor,
        sent: torch.Tensor,
        group: object,
        sizes: tuple[list[int], list[int]] | None = None,
    ) -> _Ended:
        leaving = [sent.numel() // self._size] * self._size if sizes is None else list(sizes[1])
        everyone = self._exchange([part.clone() for part in sent.split(leaving)])
        received.copy_(torch.cat([parts[self.here.rank] for parts in everyone]))
        return _Ended()

    def abort(self) -> None:
        """End the waiting of the other threads."""
        self._barrier.abort()


def run_context(size: int, function: Callable[[ContextGroup], Any]) -> list[Any]:
    """Run ``function(group)`` on each rank of a context group; return what they return."""
    collectives = ThreadCollectives(size)
    results: list[Any] = [None] * size
    errors: list[str] = []

    def run(rank: int) -> None:
        collectives.here.rank = rank
        ranks: Any = types.SimpleNamespace(
            rank_in=lambda kind: rank,
            size=lambda kind: size,
            cfg=types.SimpleNamespace(context_parallel="all_gather"),
            process_group=lambda kind: None,
            collectives=collectives,
        )
        try:
            results[rank] = function(ContextGroup(ranks))
        except threading.BrokenBarrierError:
            pass
        except BaseException:
            errors.append(traceback.format_exc())
            collectives.abort()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise AssertionError(errors[0])
    return results


def cut(whole: torch.Tensor, group: ContextGroup, dim: int = 1) -> ShardedSequence:
    """The sequence of a whole tensor; gradients reach it through the slices."""
    layout = zigzag(whole.shape[dim], group.size)
    return ShardedSequence(group.take(whole, dim, layout), dim, layout, group)


def whole_of(value: Any) -> Any:
    """Results with whole tensors."""
    if isinstance(value, ShardedSequence):
        return value.whole("test")
    if isinstance(value, list | tuple):
        return [whole_of(item) for item in value]
    return value


def assert_equal_to_alone(
    everyone: list[tuple[Any, list[torch.Tensor]]], wanted: Any, gradients: list[torch.Tensor]
) -> None:
    """Check that all ranks have the outputs of one process, and that the mean of their gradients is its own."""
    for found, _ in everyone:
        torch.testing.assert_close(found, wanted, atol=1e-10, rtol=1e-10)
    for number, gradient in enumerate(gradients):
        mean = sum(of_rank[number] for _, of_rank in everyone) / len(everyone)
        torch.testing.assert_close(mean, gradient, atol=1e-10, rtol=1e-10)
