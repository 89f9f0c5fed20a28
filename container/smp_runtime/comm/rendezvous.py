"""The store at which the ranks of a job meet: it listens only at the address by which its ranks call it."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from smp_config.machine.interfaces import LOOPBACK, list_addresses
from smp_config.machine.launchers import ADDRESS_VARIABLE, PORT_VARIABLE
from smp_runtime.comm.authentication import is_loopback, on_one_machine

#: The interface between the hosts, as gloo reads it; our launcher sets it.
INTERFACE_VARIABLE = "GLOO_SOCKET_IFNAME"

LOCALHOST = "127.0.0.1"

#: Before PyTorch 2.9, only the older of its two kinds of store accepts a listening socket (2.4 to 2.7 report this).
_ANY_KIND_TAKES_A_SOCKET = torch.__version__ >= "2.9"

#: Seconds for a host to answer at one of its addresses. A route that leads nowhere returns no error.
_ANSWER_SECONDS = 3.0

#: Those that this process has come to, by address, port, rank, number of ranks, and whether an agent keeps it.
_stores: dict[tuple[str, int, int, int, bool], dist.Store] = {}


def store_at_meeting_place(rank: int, size: int, environ: Mapping[str, str], seconds: float) -> dist.Store:
    """Return the store at ``MASTER_ADDR`` and ``MASTER_PORT``, which rank 0 or torchrun's agent serves.

    A process that joins again gets its former store. Rank 0 cannot listen twice, and the others must not meet at a
    store that has just ended.

    Raises:
        RuntimeError: PyTorch's error if the others are not there in time, or the port is taken.
    """
    timeout = timedelta(seconds=seconds)
    address, port = environ[ADDRESS_VARIABLE], int(environ[PORT_VARIABLE])
    has_agent = environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    place = (address, port, rank, size, has_agent)
    known = _stores.get(place)
    if known is not None and _answers(known):
        return known
    _stores[place] = store = _joined_store(place, environ, timeout)
    return store


def _joined_store(place: tuple[str, int, int, int, bool], environ: Mapping[str, str], timeout: timedelta) -> dist.Store:
    address, port, rank, size, has_agent = place
    serves = rank == 0 and not has_agent
    listens = listening_address(address, environ, size) if serves else None
    if listens:
        # Others of this process who start a store at this port, as torch.distributed does by env://, get the same.
        return kept_store(listens, port, timeout, calls=address, world_size=size, multi_tenant=True)
    store, _, _ = next(iter(dist.rendezvous("env://", rank=rank, world_size=size, timeout=timeout)))
    return store


def _answers(store: dist.Store) -> bool:
    """Return whether the process that keeps a store still runs."""
    try:
        store.check(["smp-control"])
    except RuntimeError:
        return False
    return True


def _ipv4_addresses(name: str) -> set[str]:
    """Return the addresses that a name stands for; none if it is unknown."""
    try:
        return {str(found[4][0]) for found in socket.getaddrinfo(name, None, socket.AF_INET, socket.SOCK_STREAM)}
    except OSError:
        return set()


def listening_address(called: str, environ: Mapping[str, str], size: int) -> str:
    """Return the one address of this machine at which other ranks reach a store as ``called``.

    Return an empty string if it is uncertain. On other hosts a name may mean another address, unless it means that of
    the interface between the hosts.

    Args:
        size: number of ranks of the job.
    """
    if called == "::1":
        return ""
    if is_loopback(called):
        return LOCALHOST
    meant = _ipv4_addresses(called)
    if not meant:
        return ""
    own = list_addresses()
    if called in own.values():
        return called
    is_here_only = len(meant) == 1 and is_loopback(*meant)
    if is_here_only and on_one_machine(environ, size):
        return next(iter(meant))
    between = own.get(environ.get(INTERFACE_VARIABLE, ""), "")
    return between if meant == {between} else ""


def kept_store(listens: str, port: int, timeout: timedelta, *, calls: str, **more: Any) -> dist.TCPStore:
    """Start a store in this process that listens at one address only; PyTorch's own listens at all.

    Args:
        listens: an address of this machine.
        port: 0 for any free port.
        calls: the address at which this process connects to it.
        more: see ``TCPStore``.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((listens, port))
        except OSError as error:
            raise dist.DistNetworkError(f"listening at {listens} port {port} failed: {error}") from None
        chosen, descriptor = listener.getsockname()[1], listener.detach()
    if not _ANY_KIND_TAKES_A_SOCKET:
        more["use_libuv"] = False
    # The store owns the socket from now on. It closes the socket even if no rank connects.
    return dist.TCPStore(calls, chosen, is_master=True, timeout=timeout, master_listen_fd=descriptor, **more)


def callable_addresses(environ: Mapping[str, str]) -> list[str]:
    """Return the addresses at which other hosts may reach this one.

    This is the address that the launcher has set, else that of the interface between the hosts. If neither is set, it
    is the host name, then the addresses of all interfaces.
    """
    if given := environ.get(ADDRESS_VARIABLE):
        return [given]
    if between := list_addresses().get(environ.get(INTERFACE_VARIABLE, "")):
        return [between]
    name = socket.gethostname()
    try:
        socket.getaddrinfo(name, None)
    except OSError:
        names = []  # this rank connects to itself too, and cannot resolve the name
    else:
        names = [name]
    return [*names, *(address for name, address in list_addresses().items() if name != LOOPBACK)] or [LOCALHOST]


def find_answering(called: Sequence[str], port: int) -> str:
    """Return the first of ``called`` at which something listens, or else the first of all.

    The latter makes the connection to it report the error. A name may mean nothing on this host, or this host itself.
    """
    for address in called if len(called) > 1 else ():
        with contextlib.suppress(OSError), socket.create_connection((address, port), timeout=_ANSWER_SECONDS):
            return address
    return called[0]


def stay_inside() -> None:
    """Make gloo listen on loopback unless another interface is set, since all ranks are on this machine."""
    os.environ.setdefault(INTERFACE_VARIABLE, LOOPBACK)
