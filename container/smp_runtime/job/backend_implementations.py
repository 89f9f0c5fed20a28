"""The implementations of the backends of collectives; their traits are in :mod:`smp_config.machine.collective_backends`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from smp_config.machine.collective_backends import GLOO, NCCL, SMDDP
from smp_runtime.comm.collectives import Collectives, TorchCollectives
from smp_runtime.smddp.registration import register
from smp_runtime.tensors.torch_private import set_timeout

#: Makes this rank's side of a process group of two: ``connect(store, rank, timeout, name)``.
PairConnector = Callable[[dist.Store, int, timedelta, str], Any]

#: PyTorch's watchdog looks every 100 ms at the messages that it has not seen end, and at their communicator's state. It ends the
#: process if the other rank has freed the communicator by then, although all messages have arrived.
_NCCL_QUIET_SECONDS = 0.3


@dataclass(frozen=True)
class BackendImplementation:
    """What the runtime calls of a backend.

    Attributes:
        register: makes the backend known to PyTorch; called before the first group.
        collectives: makes the collectives of the strategies.
        connect_pair: connects two stages of a pipeline; None if their tensors go through host memory.
        quiet_seconds: the time between the end of a pair's last message and the end of the pair at the other rank.
    """

    register: Callable[[], None] | None = None
    collectives: Callable[[], Collectives] = TorchCollectives
    connect_pair: PairConnector | None = None
    quiet_seconds: float = 0.0


def connect_nccl_pair(store: dist.Store, rank: int, timeout: timedelta, name: str) -> Any:
    """Make a process group of NCCL for two ranks, which connects at the first message."""
    options: Any = dist.ProcessGroupNCCL.Options()
    set_timeout(options, timeout)
    options.group_name = name
    return dist.ProcessGroupNCCL(store, rank, 2, options)


def connect_gloo_pair(store: dist.Store, rank: int, timeout: timedelta, name: str) -> Any:
    """Make a process group of gloo for two ranks."""
    return dist.ProcessGroupGloo(store, rank, 2, timeout=timeout)


def _make_smddp_collectives() -> Collectives:
    # Its modules are loaded only in jobs that use it.
    from smp_runtime.smddp.process_group import SmddpCollectives

    return SmddpCollectives()


_IMPLEMENTATIONS = {
    NCCL: BackendImplementation(connect_pair=connect_nccl_pair, quiet_seconds=_NCCL_QUIET_SECONDS),
    GLOO: BackendImplementation(connect_pair=connect_gloo_pair),
    SMDDP: BackendImplementation(register, _make_smddp_collectives),
}

_PLAIN = BackendImplementation()


def implementation_of(backend: str) -> BackendImplementation:
    """Return the implementation of a backend; one that only PyTorch knows needs none of its own.

    Args:
        backend: a name, or the string of PyTorch for groups of several, such as ``"cpu:gloo,cuda:nccl"``.
    """
    return _IMPLEMENTATIONS.get(backend, _PLAIN)
