"""Bytes that a rank sends, read off the tensors at the collectives, and the least that could be sent."""

from __future__ import annotations


class CountingCollectives:
    """The library's collectives, with the bytes that this rank sends added up (bandwidth-optimal algorithms)."""

    def __init__(self) -> None:
        from smp_runtime.comm.collectives import TorchCollectives

        self._inner = TorchCollectives()
        self.sent = 0.0

    def all_reduce(self, tensor, group):
        self.sent += 2 * (group.size() - 1) / group.size() * tensor.nbytes
        return self._inner.all_reduce(tensor, group)

    def broadcast(self, tensor, source, group):
        self.sent += tensor.nbytes * (group.size() - 1) / group.size()
        return self._inner.broadcast(tensor, source, group)

    def reduce_scatter(self, shard, full, group):
        self.sent += (group.size() - 1) * shard.nbytes
        return self._inner.reduce_scatter(shard, full, group)

    def all_gather(self, full, shard, group):
        self.sent += (group.size() - 1) * shard.nbytes
        return self._inner.all_gather(full, shard, group)

    def all_to_all(self, received, sent, group):
        self.sent += (group.size() - 1) / group.size() * sent.nbytes
        return self._inner.all_to_all(received, sent, group)


def bytes_bound(elements: int, ranks: int, precision: str, *, sharded: bool) -> float:
    """Least bytes that a rank sends per step of data parallel training: 2(n−1)/n · Ψ · bytes per element.

    Gradients go once around in the type they are summed in, and as much again: whole gradients in that type, or with
    sharded state the updated parameters in the type they are stored in.
    """
    summed = 2 if precision == "fp16" else 4
    again = (2 if precision in ("fp16", "bf16") else 4) if sharded else summed
    return (ranks - 1) / ranks * elements * (summed + again)
