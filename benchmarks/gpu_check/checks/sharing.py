"""Two ranks that share one GPU: the library's collectives there, and NCCL in plain PyTorch."""

from __future__ import annotations

import datetime
import os
import time

import torch
import torch.distributed as dist

import smdistributed.modelparallel.torch as smp
from gpu_check import environment, nccl
from gpu_check.device import is_real, synchronize
from gpu_check.measurements import to_ms
from gpu_check.processes import run_ranks
from gpu_check.results import emit
from smp_config import Group
from smp_runtime.comm.authentication import machine_id
from smp_runtime.comm.devices import let_nccl_share, nccl_version

_DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.uint8)


def check_start_shared() -> None:
    """Try every collective of the library on two ranks."""
    run_ranks(2, rank_shared)


class Collectives:
    """Calls of the library's collectives between two ranks, and their wrong results.

    Attributes:
        wrong: a line for each wrong result, and for each error.
    """

    def __init__(self) -> None:
        self._rank = smp.rank()
        self._group = smp.state.process_group(Group.WORLD)
        self._collectives = smp.state.collectives
        self._device = smp.state.device
        self.wrong: list[str] = []

    def try_each(self, dtype: torch.dtype, elements: int) -> None:
        """Call each collective once; rank ``r`` gives ``base + r``."""
        base = torch.arange(elements, device=self._device) % 7
        mine = (base + self._rank).to(dtype)
        half = elements // 2
        own_half = slice(self._rank * half, (self._rank + 1) * half)
        sizes = f"{dtype} {elements}"
        try:
            x = mine.clone()
            self._collectives.all_reduce(x, self._group).wait()
            self._expect(f"all_reduce {sizes}", x, 2 * base + 1)
            x = mine.clone()
            self._collectives.broadcast(x, 1, self._group).wait()
            self._expect(f"broadcast {sizes}", x, base + 1)
            full = torch.empty(2 * elements, dtype=dtype, device=self._device)
            self._collectives.all_gather(full, mine, self._group).wait()
            self._expect(f"all_gather {sizes}", full, torch.cat([base, base + 1]))
            if dtype.is_floating_point:
                shard = torch.empty(half, dtype=dtype, device=self._device)
                self._collectives.reduce_scatter(shard, mine.clone(), self._group).wait()
                self._expect(f"reduce_scatter {sizes}", shard, (2 * base + 1)[own_half])
            received = torch.empty_like(mine)
            self._collectives.all_to_all(received, mine, self._group).wait()
            wanted = torch.cat([(base + other)[own_half] for other in range(2)])
            self._expect(f"all_to_all {sizes}", received, wanted)
        except Exception as error:
            self.wrong.append(f"{sizes}: {type(error).__name__}: {str(error)[:200]}")

    def try_queue(self) -> float | None:
        """Start many all-reduces behind work of the stream, and free memory meanwhile.

        Returns:
            The seconds of an all-reduce of 4 MiB, None after an error.
        """
        try:
            works = []
            for index in range(20):
                x = torch.full((2**18,), float(index + self._rank), device=self._device)
                x = x * 1.0
                works.append((index, x, self._collectives.all_reduce(x, self._group)))
            for index, x, work in works:
                work.wait()
                y = x + 0
                del x
                self._expect(f"queue {index}", y[:8], torch.full((8,), 2.0 * index + 1))
            x = torch.ones(2**20, device=self._device)
            begin = time.perf_counter()
            for _ in range(10):
                self._collectives.all_reduce(x, self._group).wait()
            synchronize()
            return (time.perf_counter() - begin) / 10
        except Exception as error:
            self.wrong.append(f"queue: {type(error).__name__}: {str(error)[:200]}")
            return None

    def _expect(self, name: str, found: torch.Tensor, wanted: torch.Tensor) -> None:
        if not torch.equal(found.cpu().double(), wanted.cpu().double()):
            self.wrong.append(f"{name}: {found.flatten()[:4].tolist()} instead of {wanted.flatten()[:4].tolist()}")


def rank_shared() -> None:
    """Compare the result of each collective with the right one."""
    smp.init({"ddp": True})
    device, inner = smp.state.device, smp.state.collectives
    if smp.rank() == 0:
        emit(
            case="two ranks, one GPU",
            device=str(device),
            backend=smp.state.backend,
            collectives=type(inner).__name__,
            inner=type(getattr(inner, "_inner", inner)).__name__,
            ok=(device.type == "cuda") == is_real() or environment.is_emulated(),
        )
    collectives = Collectives()
    for dtype in _DTYPES:
        for elements in (8, 2**20):
            collectives.try_each(dtype, elements)
    seconds = collectives.try_queue()
    for rank, wrong in smp.allgather((smp.rank(), collectives.wrong), smp.WORLD):
        if smp.rank() == 0:
            emit(
                case=f"collectives of rank {rank}",
                ok=not wrong,
                wrong=wrong[:8],
                all_reduce_4mib_ms=seconds and to_ms(seconds),
            )


def check_nccl_shared() -> None:
    """Try NCCL on two ranks of one GPU, in plain PyTorch."""
    if not is_real():
        emit(case="nccl, one GPU", ok=None, note="no GPU")
        return
    codes = run_ranks(2, rank_nccl, environ=nccl.SHARED_GPU, timeout=40)
    emit(case="nccl, one GPU, by NCCL_HOSTID", ok=not any(codes), exits=codes)
    newer = nccl.make_newer_environment()
    if newer is not None:
        codes = run_ranks(2, rank_nccl, environ=newer, timeout=40)
        emit(case="nccl, one GPU, by a newer NCCL", ok=not any(codes), exits=codes)


def rank_nccl() -> None:
    """Reduce a tensor over NCCL, and time it."""
    rank = int(os.environ["RANK"])
    let_nccl_share(rank, [machine_id()])
    torch.cuda.set_device(0)
    dist.init_process_group("cpu:gloo,cuda:nccl", timeout=datetime.timedelta(seconds=40))
    x = torch.ones(2**20, device="cuda") * (rank + 1)
    begin = time.perf_counter()
    dist.all_reduce(x)
    synchronize()
    first = time.perf_counter() - begin
    begin = time.perf_counter()
    for _ in range(10):
        dist.all_reduce(x)
    synchronize()
    mean = (time.perf_counter() - begin) / 10
    if rank == 0:
        is_right = float(x[0]) == 3.0 * 2**10
        name = "nccl all_reduce, two ranks, one GPU"
        emit(case=name, ok=is_right, version=nccl_version(), first_s=round(first, 2), mean_ms=to_ms(mean))
    dist.destroy_process_group()
