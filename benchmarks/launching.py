"""Starting a benchmark's ranks: each benchmark runs itself again, once for every rank."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any

#: By the name of a way between ranks, what ``mp_parameters`` say of it; first that of the peers, over which both sides then go.
TRANSPORTS: dict[str, dict[str, Any]] = {
    "torch.distributed": {"host_collectives": False},
    "shared memory": {"host_collectives": True},
}
PEERS = next(iter(TRANSPORTS))


def transports(asked: Sequence[str] | None) -> list[str]:
    """Return the transports to measure: those asked for, else all that this machine has, the peers' first."""
    import torch

    return list(asked or ([PEERS] if torch.cuda.is_available() else TRANSPORTS))


def print_machine() -> None:
    """Print what the figures were measured on."""
    import torch

    print(
        f"torch {torch.__version__}, Python {platform.python_version()}, {os.cpu_count()} cores, {platform.machine()}"
    )


def run_ranks(script: str, ranks: int, words: Sequence[object], environ: Mapping[str, str] | None = None) -> None:
    """Run ``script`` with the arguments ``words`` as a job of ``ranks`` processes with one thread each."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(ranks)]
    command += ["--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0", script, *map(str, words)]
    subprocess.run(
        command, check=True, env={**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", **(environ or {})}
    )
