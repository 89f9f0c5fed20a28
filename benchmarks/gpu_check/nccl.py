"""Ways to let several ranks share one GPU over NCCL, which refuses that by itself.

Jobs of the library do it with ``SMP_SHARED_GPU=nccl``, which selects the variables of NCCL for its release. NCCL 2.30 is the
first release that allows shared GPUs. It is used if ``make gpu-wheels`` has put it into ``.gpu/nccl``. Older ones take each
rank for a host of its own.
"""

from __future__ import annotations

import gzip
import os
import shutil
import tempfile
from pathlib import Path

from gpu_check import environment

#: Variables of a job whose ranks share a GPU over NCCL.
SHARED_GPU = {"SMP_SHARED_GPU": "nccl", "NCCL_DEBUG": "WARN"}
_LIBRARY = environment.ROOT / ".gpu" / "nccl" / "libnccl.so.2"


def make_newer_environment() -> dict[str, str] | None:
    """Return the variables of such a job that preload NCCL 2.30; None if it is not there."""
    library = _LIBRARY if _LIBRARY.exists() else _unpack(_LIBRARY.with_name("libnccl.so.2.gz"))
    return None if library is None else {"LD_PRELOAD": str(library), **SHARED_GPU}


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
