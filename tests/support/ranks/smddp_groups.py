"""What the tests of SMDDP share."""

from __future__ import annotations

import os
from datetime import timedelta

import torch
import torch.distributed as dist

#: By its name before PyTorch 2.13 too.
all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


def join(host: object, backend: str = "smddp") -> dist.ProcessGroup:
    """Make this process of the shared pool a rank on a simulated host; gives the default group."""
    from smp_runtime.smddp import register

    os.environ["SMP_HOST"] = f"host-{host}"
    torch.set_num_threads(1)
    register()
    # The pool's store outlives the case and keeps what the groups of earlier cases wrote.
    store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
    dist.init_process_group(
        backend,
        store=dist.PrefixStore(f"smddp-{os.environ['TORCHELASTIC_RESTART_COUNT']}", store),
        rank=int(os.environ["RANK"]),
        world_size=int(os.environ["WORLD_SIZE"]),
        timeout=timedelta(seconds=60),
    )
    return dist.group.WORLD
