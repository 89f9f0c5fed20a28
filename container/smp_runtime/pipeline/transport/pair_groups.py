"""Process groups for tensors from one rank to another, made by these two alone when the first tensor goes that way."""

from __future__ import annotations

import logging
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from smp_runtime.comm.control import timeout_seconds
from smp_runtime.comm.groups import abort_with_others
from smp_runtime.pipeline.transport.native_calls import start_call
from smp_runtime.tensors.torch_private import default_store

logger = logging.getLogger("smp")

_SOURCE, _TARGET = 0, 1


class PairGroup:
    """A process group of two ranks; the first sends to the second.

    PyTorch does not list it, so ``destroy_process_group`` does not end it; :meth:`end` does.

    Two directions need two groups. NCCL runs the messages of a communicator in one order on one stream. If both ranks sent first,
    each would wait for the other to receive. Each direction also has its own thread on both sides, and a process group must
    not be used by several threads at once.

    Attributes:
        quiet_seconds: the time between the end of the last message and the end of the group at the other rank.
    """

    def __init__(self, backend: Any, quiet_seconds: float) -> None:
        self._backend = backend
        self.quiet_seconds = quiet_seconds
        abort_with_others(self)

    def send(self, flat: torch.Tensor) -> dist.Work:
        """Start to send a tensor; only the first rank calls it."""
        work: dist.Work = self._backend.send([flat], _TARGET, 0)
        return work

    def receive(self, flat: torch.Tensor) -> dist.Work:
        """Start to receive a tensor; only the second rank calls it."""
        work: dist.Work = self._backend.recv([flat], _SOURCE, 0)
        return work

    def end(self, seconds: float) -> bool:
        """Free the communicator, and return whether that was done in time. The end of the process frees it as well.

        Messages that are under way are given up. The other rank need not call it at the same time. NCCL's call that waits for
        messages also waits for the other rank, so two ranks that each end another direction first would wait for each other.

        Args:
            seconds: longest wait.
        """
        ending = start_call(self.abort, "smp-end-group")
        if ending is None:
            return True
        ending.join(seconds)
        return not ending.is_alive()

    def abort(self) -> None:
        """Free the communicator though messages may be under way."""
        backend, self._backend = self._backend, None
        # Before PyTorch 2.6 backends have no such method. They end with their last reference, here.
        abort = getattr(backend, "abort", None)
        if abort is not None:
            try:
                abort()
            except RuntimeError as error:  # the other rank may have gone; nothing is sent any more
                logger.debug("the process group of two stages did not end in good order: %s", error)


def pair_groups(
    connect: Callable[[dist.Store, int, timedelta, str], Any], quiet_seconds: float = 0.0
) -> Callable[[str, bool], PairGroup]:
    """Return a function that makes process groups: ``make(name, sends)``, called by both ranks with the same unique name.

    ``dist.new_group`` needs every rank of the job, each time in the same order. With ``use_local_synchronization`` it would need
    only the two, but it derives the group's name from the number of groups that a rank has, which differs between them.

    Args:
        connect: makes this rank's side of a group of two: ``connect(store, rank, timeout, name)``.
        quiet_seconds: see :class:`PairGroup`.
    """

    def make(name: str, sends: bool) -> PairGroup:
        store = dist.PrefixStore(f"smp/pair/{name}", _own_connection(default_store()))
        rank = _SOURCE if sends else _TARGET
        return PairGroup(connect(store, rank, timedelta(seconds=timeout_seconds()), name), quiet_seconds)

    return make


def _own_connection(store: dist.Store) -> dist.Store:
    """Return another connection to the same store.

    A connection answers one thread at a time. While one thread waits there for the other rank's part of a group, no other thread
    could publish this rank's part of another group. Two ranks that connect both directions at once would wait forever.
    """
    if hasattr(store, "clone"):  # since PyTorch 2.6
        return store.clone()
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    if isinstance(store, dist.TCPStore):
        return dist.TCPStore(store.host, store.port, is_master=False, timeout=timedelta(seconds=timeout_seconds()))
    return store
