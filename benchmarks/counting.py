"""Bytes that a rank sends, read off the tensors at the collectives, and the least that could be sent."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

if TYPE_CHECKING:
    from smp_runtime.comm.collectives import Collectives

#: By the collective's name, bytes sent for each byte of its first argument; by the number of ranks.
_SENT = {
    "allreduce": lambda ranks: 2 * (ranks - 1) / ranks,
    "all_reduce": lambda ranks: 2 * (ranks - 1) / ranks,
    "broadcast": lambda ranks: (ranks - 1) / ranks,
    "alltoall_base": lambda ranks: (ranks - 1) / ranks,  # its first argument is the result, of the same size
    "all_to_all_single": lambda ranks: (ranks - 1) / ranks,
    "allgather": lambda ranks: (ranks - 1) / ranks,  # the result
    "allgather_base": lambda ranks: (ranks - 1) / ranks,  # the result
    "all_gather_into_tensor": lambda ranks: ranks - 1,
    "reduce_scatter": lambda ranks: ranks - 1,  # the result
    "reduce_scatter_base": lambda ranks: ranks - 1,  # the result
    "reduce_scatter_tensor": lambda ranks: (ranks - 1) / ranks,
    "send": lambda ranks: 1,
    "recv": lambda ranks: 0,
    "barrier": lambda ranks: 0,
    "wait_tensor": lambda ranks: 0,
    "wrap_tensor_autograd": lambda ranks: 0,
}


class BytesSent(TorchDispatchMode):
    """Adds up what a rank sends while it is active, whoever sends it: PyTorch's functional collectives and those in place.

    Attributes:
        sent: bytes (bandwidth-optimal algorithms).
        calls: collectives and messages.

    Raises:
        KeyError: in a collective that is not known here.
    """

    def __init__(self) -> None:
        super().__init__()
        self.sent = 0.0
        self.calls = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        if function.namespace in ("c10d", "_c10d_functional"):
            ranks = max(map(_size, args))
            factor = _SENT[function.__name__.partition(".")[0].strip("_")](max(ranks, 1))
            if ranks > 1 and factor:
                self.calls += 1
                self.sent += factor * sum(tensor.nbytes for tensor in _tensors(args[0]))
        return function(*args, **(kwargs or {}))


def _size(value: Any) -> int:
    """Return the ranks of what may be a group, or the name of one; 0 otherwise."""
    if isinstance(value, torch.ScriptObject):
        with contextlib.suppress(RuntimeError):  # the operation of a reduction is one too
            return dist.ProcessGroup.unbox(value).size()
    if isinstance(value, str):
        with contextlib.suppress(RuntimeError, KeyError):  # so is its name
            return dist.distributed_c10d._resolve_process_group(value).size()
    return 0


def _tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    return [tensor for one in value for tensor in _tensors(one)] if isinstance(value, list | tuple) else []


class CountingCollectives:
    """The library's collectives, with the bytes that this rank sends added up (bandwidth-optimal algorithms).

    Args:
        inner: do the work; None for PyTorch's.

    Attributes:
        sent: bytes.
        asked: collectives.
    """

    def __init__(self, inner: Collectives | None = None) -> None:
        from smp_runtime.comm.collectives import TorchCollectives

        self._inner = inner or TorchCollectives()
        self.sent = 0.0
        self.asked = 0

    def empty(self, elements, dtype, device, group):
        return self._inner.empty(elements, dtype, device, group)

    def all_reduce(self, tensor, group):
        self._note(2 * (group.size() - 1) / group.size() * tensor.nbytes)
        return self._inner.all_reduce(tensor, group)

    def broadcast(self, tensor, source, group):
        self._note(tensor.nbytes * (group.size() - 1) / group.size())
        return self._inner.broadcast(tensor, source, group)

    def reduce_scatter(self, shard, full, group):
        self._note((group.size() - 1) * shard.nbytes)
        return self._inner.reduce_scatter(shard, full, group)

    def all_gather(self, full, shard, group):
        self._note((group.size() - 1) * shard.nbytes)
        return self._inner.all_gather(full, shard, group)

    def all_to_all(self, received, sent, group, sizes=None):
        # Parts of different sizes: the rank's own is not among what it sends.
        self._note(sent.nbytes * (1 if sizes else (group.size() - 1) / group.size()))
        return self._inner.all_to_all(received, sent, group, sizes)

    def _note(self, sent: float) -> None:
        self.sent += sent
        self.asked += sent > 0


def bytes_bound(elements: int, ranks: int, precision: str, *, sharded: bool) -> float:
    """Return the least bytes that a rank sends per step of data parallel training: 2(n−1)/n · Ψ · bytes per element.

    Gradients go once around in the type they are summed in, and as much again: whole gradients in that type, or with
    sharded state the updated parameters in the type they are stored in.
    """
    summed = 2 if precision == "fp16" else 4
    again = (2 if precision in ("fp16", "bf16") else 4) if sharded else summed
    return (ranks - 1) / ranks * elements * (summed + again)
