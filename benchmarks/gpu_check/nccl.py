"""Ways to let several ranks share one GPU over NCCL, which refuses that by itself.

NCCL finds ranks of one GPU by a hash of their host. With another ``NCCL_HOSTID`` each rank counts as a host of its own, and
data goes through sockets. That is slow, but uses real streams, communicators and time limits. NCCL 2.30 is the first
release that allows shared GPUs (``NCCL_MULTI_RANK_GPU_ENABLE``, experimental). It is used if ``make gpu-wheels`` has put it
into ``.gpu/nccl``.
"""

from __future__ import annotations

import gzip
import os
import shutil
import tempfile
from pathlib import Path

from gpu_check import environment

#: Makes a host of each rank; ``{rank}`` is replaced by its number.
ONE_HOST_PER_RANK = {
    "NCCL_HOSTID": "smpcheck-{rank}",
    "NCCL_SOCKET_IFNAME": "lo",
    "NCCL_IB_DISABLE": "1",
    "NCCL_P2P_DISABLE": "1",
    "NCCL_SHM_DISABLE": "1",
    "NCCL_MNNVL_ENABLE": "0",
    "NCCL_NVLS_ENABLE": "0",
    "NCCL_DEBUG": "WARN",
    "NCCL_MULTI_RANK_GPU_ENABLE": "1",  # NCCL 2.30 needs it too
}
_SHARED_GPU = {
    "NCCL_SOCKET_IFNAME": "lo",
    "NCCL_DEBUG": "WARN",
    "NCCL_MULTI_RANK_GPU_ENABLE": "1",
    "NCCL_NVLS_ENABLE": "0",
    "NCCL_MAX_CTAS": "4",  # more than two ranks would not find room for their kernels
    "NCCL_NET_GDR_LEVEL": "LOC",
    "NCCL_IB_DISABLE": "1",
}
_LIBRARY = environment.ROOT / ".gpu" / "nccl" / "libnccl.so.2"


def make_newer_environment() -> dict[str, str] | None:
    """Return the variables that preload NCCL 2.30 and let ranks share a GPU; None if it is not there."""
    library = _LIBRARY if _LIBRARY.exists() else _unpack(_LIBRARY.with_name("libnccl.so.2.gz"))
    return None if library is None else {"LD_PRELOAD": str(library), **_SHARED_GPU}


def _unpack(packed: Path) -> Path | None:
    """Return the unpacked library, None if there is none to unpack."""
    library = Path(tempfile.gettempdir(), "smpcheck-nccl", "libnccl.so.2")
    if library.exists() or not packed.exists():
        return library if packed.exists() else None
    library.parent.mkdir(exist_ok=True)
    # Checks beside this one may unpack it too; the name appears only with the whole file.
    part = library.with_name(f"{os.getpid()}.part")
    with gzip.open(packed) as source, part.open("wb") as target:
        shutil.copyfileobj(source, target)
    part.rename(library)
    return library


def allow_shared_gpus() -> None:
    """Let the library use NCCL although ranks share a GPU.

    Outside these checks it refuses NCCL then, since NCCL would not start.
    """
    import smp_runtime.comm.devices as devices

    devices.sharing_ranks = lambda visible: []


def become_host(rank: int) -> None:
    """Make this process the only rank of a host, before it starts NCCL."""
    os.environ.update({name: value.replace("{rank}", str(rank)) for name, value in ONE_HOST_PER_RANK.items()})
