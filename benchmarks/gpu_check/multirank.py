"""Tries the collectives of plain PyTorch between several ranks on one GPU, by hand.

    timeout 60 torchrun --local-addr 127.0.0.1 --nproc-per-node 2 benchmarks/gpu_check/multirank.py nccl

The argument is ``nccl`` or ``gloo``. Prints a line for each collective: whether its result is right, or the error. Every
collective runs twice; the first time includes the set-up of communicators. Give it a time limit: ranks may wait forever.
Without a GPU it tries gloo on the CPU. ``smp_runtime.comm.devices.nccl_sharing_variables`` returns the variables with which
ranks can share a GPU over NCCL.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

import torch
import torch.distributed as dist

_ELEMENTS = 1 << 20


class Collectives:
    """The collectives that are tried, on one tensor per rank.

    Args:
        device: of the tensors.
    """

    def __init__(self, device: torch.device) -> None:
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self._x = torch.full((_ELEMENTS,), float(self.rank + 1), device=device)

    def all_reduce(self) -> torch.Tensor:
        result = self._x.clone()
        dist.all_reduce(result)
        return result

    def all_gather(self) -> torch.Tensor:
        result = self._x.new_empty(self.world * _ELEMENTS)
        dist.all_gather_into_tensor(result, self._x)
        return result.view(self.world, -1).sum(0)

    def reduce_scatter(self) -> torch.Tensor:
        result = self._x.new_empty(_ELEMENTS // self.world)
        dist.reduce_scatter_tensor(result, self._x[: result.numel() * self.world])
        return result

    def all_to_all(self) -> torch.Tensor:
        usable = self._x[: _ELEMENTS // self.world * self.world]
        result = torch.empty_like(usable)
        dist.all_to_all_single(result, usable)
        return result.view(self.world, -1).sum(0)

    def broadcast(self) -> torch.Tensor:
        result = self._x.clone()
        dist.broadcast(result, 0)
        return result

    def send_and_receive(self) -> torch.Tensor:
        result = torch.empty_like(self._x)
        operations = [
            dist.P2POp(dist.isend, self._x, (self.rank + 1) % self.world),
            dist.P2POp(dist.irecv, result, (self.rank - 1) % self.world),
        ]
        for work in dist.batch_isend_irecv(operations):
            work.wait()
        return result


def try_collective(name: str, run: Callable[[], torch.Tensor], wanted: float) -> None:
    """Run a collective; rank 0 prints whether all elements of its result are ``wanted``."""
    begin = time.time()
    try:
        result = run()
        if result.is_cuda:
            torch.cuda.synchronize()
        is_right = bool(torch.allclose(result, torch.full_like(result, wanted)))
        text = "right" if is_right else f"WRONG {result.flatten()[:3].tolist()}"
    except Exception as error:
        text = f"{type(error).__name__}: {str(error)[:120]}"
    if dist.get_rank() == 0:
        print(f"{name:14} {text} {1e3 * (time.time() - begin):.1f} ms", flush=True)


def main() -> None:
    backend = sys.argv[1] if len(sys.argv) > 1 else "nccl"
    has_gpu = torch.cuda.is_available()
    device = torch.device("cuda:0" if has_gpu else "cpu")
    if has_gpu:
        torch.cuda.set_device(device)
    dist.init_process_group(f"cpu:gloo,cuda:{backend}" if has_gpu else "gloo")
    collectives = Collectives(device)
    rank, world = collectives.rank, collectives.world
    if rank == 0:
        version = torch.cuda.nccl.version() if has_gpu else None
        print("torch", torch.__version__, "nccl", version, "world", world, flush=True)
    total = float(world * (world + 1) / 2)
    for _ in range(2):
        try_collective("all_reduce", collectives.all_reduce, total)
        try_collective("all_gather", collectives.all_gather, total)
        try_collective("reduce_scatter", collectives.reduce_scatter, total)
        try_collective("all_to_all", collectives.all_to_all, total)
        try_collective("broadcast", collectives.broadcast, 1.0)
        if world > 1:
            try_collective("send, receive", collectives.send_and_receive, float((rank - 1) % world + 1))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
