"""Hosts on one machine: network namespaces with addresses of their own and a limited link between each two neighbours.

Needs root and the programs ``ip`` and ``tc``. All that is made has names that begin with one prefix of this process, lives
in the new namespaces alone, and goes away with them; traffic goes only to the new addresses.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

#: The link of the figures that are published: bits per second, seconds, and the packets of a cloud's inner network.
RATE = 1_000_000_000
DELAY = 0.001
MTU = 9001

#: Seconds for any one call of ``ip`` or ``tc``.
_PATIENCE = 20.0


@dataclass(frozen=True)
class Host:
    """One host of the two.

    Attributes:
        name: of its namespace, and as its ranks announce it.
        interface: its end of the link.
        address: there.
    """

    name: str
    interface: str
    address: str

    def received_bytes(self) -> int:
        """All bytes that have come over the link, headers and acknowledgements included."""
        shown = json.loads(_run("ip", "-n", self.name, "-json", "-s", "link", "show", "dev", self.interface))
        return int(shown[0]["stats64"]["rx"]["bytes"])

    def environment(self) -> dict[str, str]:
        """What a rank on this host needs to know."""
        return {"SMP_HOST": self.name, "GLOO_SOCKET_IFNAME": self.interface}

    def command(self, words: Sequence[str]) -> list[str]:
        """``words`` as a command that runs on this host."""
        return ["ip", "netns", "exec", self.name, *words]


@dataclass(frozen=True)
class Link:
    """Two hosts and what lies between them.

    Attributes:
        delayed: whether the kernel could delay packets; some have no such queue.
    """

    hosts: tuple[Host, Host]
    rate: int
    delayed: bool

    def describe(self) -> str:
        delay = f"{DELAY * 1e3:g} ms" if self.delayed else "no added delay (this kernel has no netem)"
        return f"{self.rate / 1e9:g} Gbit/s each way, {delay}, packets of {MTU} bytes"


def why_not() -> str | None:
    """Why namespaces cannot be made here; None when they can."""
    if not sys.platform.startswith("linux"):
        return "network namespaces need Linux"
    if os.geteuid() != 0:
        return "making network namespaces needs root"
    for program in ("ip", "tc"):
        if shutil.which(program) is None:
            return f"the program {program} (package iproute2) is missing"
    try:
        with two_hosts():
            return None
    except (subprocess.SubprocessError, OSError) as error:
        said = getattr(error, "stderr", "") or error
        return f"network namespaces with a limited link cannot be made here: {str(said).strip()}"


@contextlib.contextmanager
def two_hosts(rate: int = RATE) -> Iterator[Link]:
    """Two namespaces with a link between them that carries ``rate`` bits per second each way."""
    mark = f"smp{os.getpid() % 0xFFFF:x}{threading.get_ident() % 0xFFF:x}"
    # A test network of RFC 2544, which no one routes.
    hosts = tuple(Host(f"{mark}-{letter}", f"{mark}{letter}", f"198.18.77.{n}") for n, letter in enumerate("ab", 1))
    made = []
    # A request to end must not leave the namespaces behind; only the main thread may say so.
    main = threading.current_thread() is threading.main_thread()
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(143)) if main else None
    try:
        for host in hosts:
            made.append(host.name)
            _run("ip", "netns", "add", host.name)
        a, b = hosts
        _run(
            *("ip", "link", "add", a.interface, "netns", a.name, "type", "veth"),
            *("peer", "name", b.interface, "netns", b.name),
        )
        delayed = True
        for host in hosts:
            _run("ip", "-n", host.name, "address", "add", f"{host.address}/30", "dev", host.interface)
            _run("ip", "-n", host.name, "link", "set", "lo", "up")
            _run("ip", "-n", host.name, "link", "set", host.interface, "mtu", str(MTU), "up")
            delayed = _limit(host, rate) and delayed
        yield Link((a, b), rate, delayed)
    finally:
        for name in made:
            # The link goes with the namespaces of its ends.
            subprocess.run(["ip", "netns", "delete", name], capture_output=True, timeout=_PATIENCE, check=False)
        if main:
            signal.signal(signal.SIGTERM, before)


def start_ranks(
    link: Link, per_host: int, words: Sequence[str], environ: Mapping[str, str] | None = None
) -> list[subprocess.Popen[str]]:
    """Start ``python words…`` as ranks, ``per_host`` on each host; each finds its place in ``RANK`` and so on."""
    size = per_host * len(link.hosts)
    started = []
    for rank in range(size):
        host = link.hosts[rank // per_host]
        known = {
            "RANK": str(rank),
            "WORLD_SIZE": str(size),
            "LOCAL_RANK": str(rank % per_host),
            "MASTER_ADDR": link.hosts[0].address,
            "OMP_NUM_THREADS": "1",
            **host.environment(),
        }
        process = subprocess.Popen(
            host.command([sys.executable, *words]),
            env={**os.environ, **known, **(environ or {})},
            stdout=subprocess.PIPE if rank == 0 else None,
            stdin=subprocess.DEVNULL,
            text=True,
        )
        started.append(process)
    return started


def run_ranks_on(
    link: Link, per_host: int, words: Sequence[str], environ: Mapping[str, str] | None = None, timeout: float = 300.0
) -> str:
    """Run ranks to their end; gives what the first one printed.

    Raises:
        RuntimeError: a rank failed, or they took more than ``timeout`` seconds.
    """
    processes = start_ranks(link, per_host, words, environ)
    try:
        printed, _ = processes[0].communicate(timeout=timeout)
        codes = [process.wait(timeout=timeout) for process in processes]
    except subprocess.TimeoutExpired:
        raise RuntimeError(f"the ranks took more than {timeout:g} s") from None
    finally:
        for process in processes:
            if process.poll() is None:
                process.kill()
                process.wait()
    if any(codes):
        raise RuntimeError(f"ranks ended with the codes {codes}; {printed}")
    return printed


def _limit(host: Host, rate: int) -> bool:
    """Limit what leaves the host; whether it is delayed too."""
    queue = ["tc", "-n", host.name, "qdisc", "add", "dev", host.interface, "root"]
    delay = [*queue, "netem", "delay", f"{DELAY * 1e3:g}ms", "rate", f"{rate}bit", "limit", "20000"]
    if subprocess.run(delay, capture_output=True, timeout=_PATIENCE, check=False).returncode == 0:
        return True
    _run(*queue, "tbf", "rate", f"{rate}bit", "burst", "80kb", "latency", "50ms")
    return False


def _run(*words: str) -> str:
    done = subprocess.run(
        words, capture_output=True, text=True, timeout=_PATIENCE, check=True, stdin=subprocess.DEVNULL
    )
    return done.stdout
