"""Process groups of ``torch.distributed``, one for every group of the topology."""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import signal
import socket
import stat
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Protocol

import torch
import torch.distributed as dist

from smp_config import Group, Topology
from smp_config.machine.collective_backends import HOST_BACKEND, TRAITS, backends_by_device, traits_of_group
from smp_runtime.comm.authentication import machine_id
from smp_runtime.comm.control import ControlPlane, timeout_seconds
from smp_runtime.comm.peer_connections import PeerConnections
from smp_runtime.comm.rendezvous import (
    LOCALHOST,
    callable_addresses,
    find_answering,
    kept_store,
    listening_address,
    stay_inside,
)
from smp_runtime.errors import SMPRuntimeError
from smp_runtime.tensors.torch_private import abort_process_groups

logger = logging.getLogger("smp")

#: Seconds that the calls of a GPU have to end once they are aborted; other exit handlers need time too.
ABORT_SECONDS = 1.0

#: Seconds for pending collectives without a waiter, before their connections are closed. Less after a failure.
_UNDER_WAY_SECONDS = 5.0
_UNDER_WAY_SECONDS_FAILED = 0.3

#: Seconds until the system ends a process with unfinished calls. Otherwise the interpreter's exit would wait for them.
_LAST_RESORT_SECONDS = 5.0


class _Abortable(Protocol):
    def abort(self) -> None: ...


#: Groups that PyTorch does not list; see :func:`abort_with_others`.
_unlisted: weakref.WeakSet[_Abortable] = weakref.WeakSet()
#: A group may be registered while another thread aborts all.
_unlisted_lock = threading.Lock()


def abort_with_others(group: _Abortable) -> None:
    """Register a process group that PyTorch does not list; it is aborted with those that it lists."""
    with _unlisted_lock:
        _unlisted.add(group)


class ProcessGroups:
    """The data plane: starts ``torch.distributed`` if the script has not, then slices it by the topology.

    Args:
        backend: ``"gloo"``, ``"cpu:gloo,cuda:nccl"`` or ``"smddp"``.
        port: rendezvous port, or None for a free one that rank 0 picks.
        device: where this rank computes; what is agreed on between steps lies on the CPU in any case.

    Raises:
        SMPRuntimeError: the script started ``torch.distributed`` with another number of processes.
    """

    def __init__(
        self,
        control: ControlPlane,
        topology: Topology,
        backend: str,
        port: int | None = None,
        device: torch.device | None = None,
    ) -> None:
        self._topology = topology
        self._rank = control.rank
        device = device or torch.device("cpu")
        self._device = device
        self._owns_default = not dist.is_initialized()
        before = _open_sockets()
        self._store_port = 0
        if self._owns_default:
            self._store_port = self._start(control, backend, port)
        elif dist.get_world_size() != control.size or dist.get_rank() != control.rank:
            raise SMPRuntimeError(
                f"torch.distributed was started before smp.init() as rank {dist.get_rank()} of {dist.get_world_size()}, "
                f"but this process is rank {control.rank} of {control.size}; call smp.init() first, or start it with "
                "the same ranks"
            )
        self._by_ranks: dict[tuple[int, ...], dist.ProcessGroup] = {}
        self._under_way: list[Callable[[], bool]] = []
        self._at_end: list[Callable[[], None]] = []
        world = dist.group.WORLD
        if world is None:
            raise AssertionError("torch.distributed has no default group after it was started")
        # A script may have started torch.distributed with another backend: one that serves no CPU tensors, for example.
        lacks = not has_backends(dist.get_backend_config(), {"cpu", device.type})
        # If gloo was chosen, NCCL may not work, since it needs one GPU per rank.
        avoids = backend == HOST_BACKEND and self._is_nccl
        is_own = backend in TRAITS and TRAITS[backend].is_own
        needs_own = is_own and dist.get_backend() != backend
        self._other = backend if lacks or avoids or needs_own else None
        if self._other is None:
            self._by_ranks[tuple(range(topology.world_size))] = world
        self._make_groups(topology)
        self._sockets = _open_sockets() - before
        # A rank that leaves at once must not hang up while others are still connecting.
        self._peers = PeerConnections(self._sockets, control)
        control.lost_ranks = self._peers.lost

    def _make_groups(self, topology: Topology) -> None:
        """Create the process groups of a topology that do not exist yet, in the same order on all ranks."""
        timeout = timedelta(seconds=timeout_seconds())
        for ranks in groups_to_name(topology, self._rank):
            if ranks not in self._by_ranks:
                alone = len(ranks) == 1  # no other rank needs to know its name
                made = dist.new_group(
                    list(ranks), timeout=timeout, backend=self._other, use_local_synchronization=alone
                )
                self._by_ranks[ranks] = made  # non-members hold a placeholder they never use

    def slice_by(self, topology: Topology) -> None:
        """Switch to the groups of another topology of the same ranks; every rank calls it.

        Former groups are kept for a way back. NCCL groups hold GPU memory, so they end once the new ones exist.
        """
        before = _open_sockets()
        self._make_groups(topology)
        self._topology = topology
        self._sockets |= _open_sockets() - before
        if self._is_nccl:
            used = {tuple(range(topology.world_size)), *groups_to_name(topology, self._rank)}
            for ranks in [ranks for ranks in self._by_ranks if ranks not in used]:
                dist.destroy_process_group(self._by_ranks.pop(ranks))

    def group(self, kind: Group) -> dist.ProcessGroup:
        """Return this rank's process group of that kind."""
        return self._by_ranks[tuple(self._topology.group_of(kind, self._rank))]

    def cut_off(self) -> None:
        """End all connections to other ranks at once; for drills."""
        self._tell_end()
        self._peers.cut()

    def let_end(self, is_under_way: Callable[[], bool]) -> None:
        """Register a collective that no call waits for.

        :meth:`close` waits briefly for it while ``is_under_way()`` returns True. A gloo group that is freed with a
        queued send, on a closed connection, would block until its deadline.
        """
        self._under_way.append(is_under_way)

    def at_end(self, tell: Callable[[], None]) -> None:
        """Register a function that is called when these groups end, for other connections between the same ranks."""
        self._at_end.append(tell)

    def close(self, patience: float = _UNDER_WAY_SECONDS) -> None:
        """Shut down the groups that were started here, and wait up to ``patience`` seconds for pending work."""
        self._tell_end()
        if self._owns_default and dist.is_initialized():
            self._await_pending(time.monotonic() + patience)
            self._under_way.clear()
            dist.destroy_process_group()
            self._hang_up()

    def _await_pending(self, deadline: float) -> None:
        while time.monotonic() < deadline:
            if not any(is_under_way() for is_under_way in self._under_way):
                return
            time.sleep(0.001)

    def _tell_end(self) -> None:
        while self._at_end:
            self._at_end.pop()()

    def _hang_up(self) -> None:
        """End the connections of gloo, which has no such call: a model that the script still holds would keep them.

        A rank that waits for this one in a collective gets an error then, though the process lives on in ``MPI_Finalize``.
        """
        for descriptor, number in self._sockets:
            try:
                if os.fstat(descriptor).st_ino != number:
                    continue  # closed, and its descriptor used again
                with socket.socket(fileno=os.dup(descriptor)) as connection:
                    # The store's connections stay open: other ranks may still read from it.
                    if self._store_port not in (connection.getsockname()[1], connection.getpeername()[1]):
                        connection.shutdown(socket.SHUT_WR)
            except (OSError, IndexError):  # closed, not connected, or no connection between hosts
                continue

    def abandon(self) -> None:
        """Leave after a failure, while others may still wait for this rank, or it for them.

        If calls of a GPU are still under way, an orderly shutdown of a group would wait for them until NCCL's own deadline.
        So they are aborted. If that has not ended within ``ABORT_SECONDS``, the system ends the process soon.
        """
        if not self._owns_default or not dist.is_initialized() or not self._is_nccl:
            self.close(_UNDER_WAY_SECONDS_FAILED)
            return
        _abort_in_time()

    @property
    def _is_nccl(self) -> bool:
        """Return whether the default group uses NCCL for this rank's GPU, with or without SMDDP's phases."""
        return _uses_nccl(self._device.type)

    @staticmethod
    def _start(control: ControlPlane, backend: str, port: int | None) -> int:
        """Start ``torch.distributed``, and return the port of its store."""
        everyone = list(range(control.size))
        timeout = timedelta(seconds=timeout_seconds())
        store: dist.Store
        agreed = 0
        if control.size == 1:
            store = dist.HashStore()
        else:
            machines = set(control.allgather(machine_id(), everyone))
            one_machine = len(machines) == 1 and "" not in machines
            if one_machine:
                stay_inside()
            if control.rank == 0:
                called = [LOCALHOST] if one_machine else callable_addresses(os.environ)
                # Port 0 binds a free port at once, so that no other process can take it in between.
                store = _own_store(called, port or 0, timeout, control.size)
                agreed = store.port
                control.broadcast((called, agreed), everyone)
            else:
                called, agreed = control.broadcast(None, everyone)
                store = dist.TCPStore(find_answering(called, agreed), agreed, is_master=False, timeout=timeout)
        dist.init_process_group(backend, store=store, rank=control.rank, world_size=control.size, timeout=timeout)
        return agreed


def _own_store(called: Sequence[str], port: int, timeout: timedelta, size: int) -> dist.TCPStore:
    """Start the store that this rank serves.

    It listens only at the address by which other ranks call it, or at all addresses if there are several or it is
    uncertain.
    """
    listens = listening_address(called[0], os.environ, size) if len(called) == 1 else ""
    if listens:
        return kept_store(listens, port, timeout, calls=called[0], wait_for_workers=False)
    return dist.TCPStore(called[0], port, is_master=True, wait_for_workers=False, timeout=timeout)


def groups_to_name(topology: Topology, rank: int) -> list[tuple[int, ...]]:
    """Return the groups that a rank creates in PyTorch: its own, and all groups of several ranks.

    PyTorch numbers groups of several ranks, so they come in the same order on all ranks.
    """
    named: dict[tuple[int, ...], None] = {}
    for kind in Group:
        for members in topology.groups(kind):
            ranks = tuple(members)
            is_own = ranks == (rank,)
            if is_own or len(ranks) > 1:
                named[ranks] = None
    return list(named)


def has_backends(backends: str, devices: set[str]) -> bool:
    """Return whether a process group has a backend for each of the kinds of devices.

    Args:
        backends: as returned by ``torch.distributed.get_backend_config``, for example ``"cpu:gloo,cuda:nccl"``.
        devices: kinds, for example ``{"cpu", "cuda"}``.
    """
    return devices <= backends_by_device(backends).keys()


def _open_sockets() -> set[tuple[int, int]]:
    """Return descriptor and number of every socket of this process; none if the system does not list them."""
    found = set()
    with contextlib.suppress(OSError):
        for name in os.listdir("/proc/self/fd"):
            with contextlib.suppress(OSError):  # the one that lists them is closed again
                status = os.fstat(int(name))
                if stat.S_ISSOCK(status.st_mode):
                    found.add((int(name), status.st_ino))
    return found


def _uses_nccl(device_type: str) -> bool:
    """Return whether the default group uses NCCL for this kind of device, with or without SMDDP's phases."""
    used = traits_of_group(dist.get_backend_config(), device_type)
    return device_type == "cuda" and used is not None and used.has_communicators


@contextlib.contextmanager
def ended_on_error() -> Iterator[None]:
    """End ``torch.distributed`` if it is started within, and an error then comes: no later job would own it."""
    is_ours = not dist.is_initialized()
    try:
        yield
    except BaseException:
        if is_ours and dist.is_initialized():
            if _uses_nccl("cuda"):
                _abort_in_time()
            else:
                dist.destroy_process_group()
        raise


def _abort_in_time() -> None:
    """Abort the calls of a GPU; make the system end the process if that takes too long."""
    # A daemon: the interpreter must not wait for it.
    aborting = threading.Thread(target=_abort, name="smp-abort", daemon=True)
    aborting.start()
    aborting.join(ABORT_SECONDS)
    if aborting.is_alive():
        logger.warning("calls of this rank's GPU have not ended %.0f s after they were aborted", ABORT_SECONDS)
        if not signal.getitimer(signal.ITIMER_REAL)[0]:  # else the launcher has set a time already
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.setitimer(signal.ITIMER_REAL, _LAST_RESORT_SECONDS)


def _abort() -> None:
    with _unlisted_lock:
        unlisted = list(_unlisted)
    # Each on a thread of its own, since a call of one group may wait for the end of another group's.
    aborting = [threading.Thread(target=group.abort, name="smp-abort-group", daemon=True) for group in unlisted]
    for each in aborting:
        each.start()
    try:
        abort_process_groups()
    except Exception as error:  # nothing waits for it: the process ends
        logger.debug("the process groups were not aborted: %s", error)
    for each in aborting:
        each.join()


if hasattr(os, "register_at_fork"):
    # Freeing a gloo group waits for its threads, which do not exist in a forked child.
    # So the child never frees garbage from before the fork.
    os.register_at_fork(after_in_child=gc.freeze)
