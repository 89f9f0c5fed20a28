"""Network and shared memory of a host: defaults for NCCL and EFA, a port, and a warning."""

from __future__ import annotations

import contextlib
import os
import re
import socket
import zlib
from collections.abc import Iterator
from pathlib import Path

from smp_config.machine.instances import instance
from smp_config.machine.interfaces import LOOPBACK as LOOPBACK

#: The port on which the ranks of a job meet.
PORT_VARIABLE = "MASTER_PORT"

#: Ports that are derived lie below those that systems give to connections (from 32768 on Linux).
_FIRST_PORT, _PORTS = 20000, 12000

#: Shared memory for each rank, in bytes, below which NCCL or data loader workers are likely to fail.
SHARED_MEMORY_PER_RANK = 128 * 2**20

_MIB = 2**20


def first_host(hosts: str) -> str:
    """Return the first host of a SLURM host list: ``node03`` of ``node[03-05,09],gpu1``."""
    first = re.split(r",(?![^\[]*\])", hosts)[0]
    return re.sub(r"\[(\w+)[^\]]*\]", r"\1", first)


def derived_port(*names: str) -> int:
    """Return a port derived from the job's names.

    All hosts of a job derive the same port. Two jobs rarely get the same one.
    """
    return _FIRST_PORT + zlib.crc32(".".join(names).encode()) % _PORTS


def network_defaults(
    instance_type: str, interface: str, hosts: int, devices: Path = Path("/sys/class/infiniband")
) -> dict[str, str]:
    """Return default variables for NCCL and libfabric; the user's own values take precedence.

    Args:
        instance_type: such as ``ml.p4d.24xlarge``; unknown types get values that work everywhere.
        interface: the network interface between the hosts.
        hosts: number of hosts; with one, nothing leaves the machine and no variable is needed.
        devices: the system's folder of adapters; an instance type that has them does not always pass them on.
    """
    if hosts < 2:
        return {}
    values = {"NCCL_SOCKET_IFNAME": interface}
    known = instance(instance_type)
    if known is not None and known.efa and devices.is_dir() and any(devices.iterdir()):
        # Forking (data loader workers) would corrupt registered memory on kernels without copy-on-fork.
        values |= {"FI_PROVIDER": "efa", "RDMAV_FORK_SAFE": "1"}
        if known.rdma:
            values["FI_EFA_USE_DEVICE_RDMA"] = "1"
    return values


def usable_interface(
    interface: str, one_machine: bool, known: Path = Path("/sys/class/net"), routes: Path = Path("/proc/net/route")
) -> str:
    """Return the interface for the ranks' connections: the platform's, if it exists.

    If it is missing, return loopback if all ranks run on this machine, and otherwise the interface of the default route.
    The local mode of SDK v3 names an interface that its containers do not have.
    """
    is_missing = known.is_dir() and not (known / interface).exists()
    if one_machine:
        # The platform writes "lo" on every system.
        is_loopback = interface == "lo"
        if is_loopback or is_missing:
            return LOOPBACK
        return interface
    if not is_missing:
        return interface
    return _default_interface(routes) or interface


def _default_interface(routes: Path) -> str | None:
    """Return the interface of the system's default route, or None if it has none or does not report it."""
    try:
        lines = routes.read_text(encoding="utf-8").splitlines()
    except OSError:
        return None
    for line in lines[1:]:  # below the header
        words = line.split()
        if len(words) > 1 and words[1] == "00000000":
            return words[0]
    return None


def shared_memory_warning(ranks: int, folder: Path = Path("/dev/shm")) -> str | None:
    """Return a warning if this host's shared memory is small for ``ranks`` ranks, or None if it suffices."""
    try:
        space = os.statvfs(folder)
    except OSError:
        return None
    size, wanted = space.f_blocks * space.f_frsize, ranks * SHARED_MEMORY_PER_RANK
    if size >= wanted:
        return None
    gib = max(1, -(-wanted // 2**30))
    return (
        f"{folder} holds {size // _MIB} MiB for {ranks} rank(s); data loader workers and NCCL may need about "
        f"{SHARED_MEMORY_PER_RANK // _MIB} MiB each and fail with a bus error; start the container with --shm-size={gib}g "
        f"(local mode: 'container_config: {{shm_size: {gib}g}}' below 'local' in ~/.sagemaker/config.yaml)"
    )


@contextlib.contextmanager
def reserved_port() -> Iterator[int]:
    """Reserve a port of this machine for the block, and yield its number.

    The system assigns it to no other process. Only a process that names it can listen on it.

    The port is bound here without listening. Others can bind it too, if they allow sharing as the stores of PyTorch do.
    So no process can take it before the first rank listens, nor between two process groups of one script.
    """
    with contextlib.ExitStack() as stack:
        try:
            held = stack.enter_context(socket.socket(socket.AF_INET6))
            held.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)  # IPv4 as well
            _bind(held, "::")
        except OSError:  # no IPv6 here
            held = stack.enter_context(socket.socket(socket.AF_INET))
            _bind(held, "")
        yield held.getsockname()[1]


def _bind(held: socket.socket, address: str) -> None:
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    held.bind((address, 0))
