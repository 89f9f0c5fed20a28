"""The library's older interface, before it was a backend of ``torch.distributed``."""

from torch.distributed import (
    ReduceOp,
    all_gather,
    all_reduce,
    barrier,
    get_rank,
    get_world_size,
    group,
    is_initialized,
    reduce,
)

from smp_runtime.smddp.older import all_to_all_single, broadcast, get_local_rank, init_process_group, is_available

__all__ = [
    "ReduceOp",
    "all_gather",
    "all_reduce",
    "all_to_all_single",
    "barrier",
    "broadcast",
    "get_local_rank",
    "get_rank",
    "get_world_size",
    "group",
    "init_process_group",
    "is_available",
    "is_initialized",
    "reduce",
]
