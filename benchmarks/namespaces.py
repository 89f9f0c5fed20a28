"""Hosts on one machine: network namespaces with addresses of their own and a limited link between them.

Needs root, the program ``ip``, and for a link without delay ``tc``: the kernel alone makes that one. A link with a delay is
that of ``wire.py``, whose relay is one more process. All that is made has names that begin with one prefix of this process,
lives in the new namespaces (the ends of a wire for a moment before that in this one), and goes away with them; traffic goes
only to the new addresses. Where this process is killed outright, the relay and its wire go too; empty namespaces remain.
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
from dataclasses import dataclass, replace
from pathlib import Path

import wire

#: The link of the figures that are published: bits per second, seconds, and the packets of a cloud's inner network.
RATE = 1_000_000_000
DELAY = 0.001
MTU = 9001

#: Where a rank finds the file of ``wire.Count``, if there is one.
COUNT = "SMP_LINK_COUNT"

#: Seconds for any one call of ``ip`` or ``tc``.
_PATIENCE = 20.0


@dataclass(frozen=True)
class Host:
    """One host of the two.

    Attributes:
        name: of its namespace, and as its ranks announce it.
        interface: its end of the link.
        address: there.
        count: the file of ``wire.Count`` of what has come to it; None over a link without delay.
    """

    name: str
    interface: str
    address: str
    count: str | None = None

    def environment(self) -> dict[str, str]:
        """Return the variables that a rank on this host needs."""
        known = {"SMP_HOST": self.name, "GLOO_SOCKET_IFNAME": self.interface}
        return known if self.count is None else {**known, COUNT: self.count}

    def command(self, words: Sequence[str]) -> list[str]:
        """Return ``words`` as a command that runs on this host."""
        return ["ip", "netns", "exec", self.name, *words]


@dataclass(frozen=True)
class Link:
    """Two hosts and what lies between them.

    Attributes:
        rate: bits per second each way.
        delay: seconds each way, besides those that the rate takes.
    """

    hosts: tuple[Host, Host]
    rate: int
    delay: float

    def describe(self) -> str:
        delay = f"{self.delay * 1e3:g} ms each way (made in user space)" if self.delay else "no added delay"
        return f"{self.rate / 1e9:g} Gbit/s each way, {delay}, packets of {MTU} bytes"

    def faults(self) -> str:
        """Return how far the wire fell short of its settings so far."""
        counts = [wire.Count.read(host.count) for host in self.hosts if host.count is not None]
        if not counts:
            return "nothing is counted without a delay"
        late = max(count.late for count in counts)
        return f"{sum(count.dropped for count in counts)} packets dropped, {late * 1e3:.2f} ms late on average"


@dataclass(frozen=True)
class Measured:
    """What one TCP connection between the hosts gets: see ``wire.ask``."""

    round_trip: float
    one_way: float
    there: float
    back: float

    def describe(self) -> str:
        return (
            f"round trip {self.round_trip * 1e3:.2f} ms; TCP {self.one_way / 1e9:.3f} Gbit/s one way, "
            f"{self.there / 1e9:.3f} and {self.back / 1e9:.3f} both ways at once"
        )


def why_not(delay: float = 0.0) -> str | None:
    """Return why namespaces with a link of this delay cannot be made here; None if they can."""
    if not sys.platform.startswith("linux"):
        return "network namespaces need Linux"
    if os.geteuid() != 0:
        return "making network namespaces needs root"
    for program in ("ip",) if delay else ("ip", "tc"):
        if shutil.which(program) is None:
            return f"the program {program} (package iproute2) is missing"
    if delay and not os.path.exists(wire.DEVICE):
        return f"{wire.DEVICE} (kernel module tun) is missing, and a link with a delay needs it"
    try:
        with two_hosts(delay=delay):
            return None
    except (subprocess.SubprocessError, OSError, RuntimeError) as error:
        said = getattr(error, "stderr", "") or error
        return f"network namespaces with a limited link cannot be made here: {str(said).strip()}"


@contextlib.contextmanager
def two_hosts(rate: int = RATE, delay: float = 0.0) -> Iterator[Link]:
    """Yield two namespaces with a link between them that carries ``rate`` bits per second each way, ``delay`` seconds later."""
    mark = f"smp{os.getpid() % 0xFFFF:x}{threading.get_ident() % 0xFFF:x}"
    # A test network of RFC 2544, which no one routes.
    a, b = (Host(f"{mark}-{letter}", f"{mark}{letter}", f"198.18.77.{n}") for n, letter in enumerate("ab", 1))
    # A request to end must not leave the namespaces behind; only the main thread may say so.
    main = threading.current_thread() is threading.main_thread()
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(143)) if main else None
    try:
        with contextlib.ExitStack() as stack:
            for host in (a, b):
                # Before it is there: it may be made and yet not be reported.
                stack.callback(_delete, host)
                _run("ip", "netns", "add", host.name)
            hosts = stack.enter_context(_wired(a, b, rate, delay)) if delay else _joined(a, b, rate)
            yield Link(hosts, rate, delay)
    finally:
        if main:
            signal.signal(signal.SIGTERM, before)


def measure(link: Link, mib: int = 64) -> Measured:
    """Send ``mib`` MiB one way, and then both ways.

    Raises:
        RuntimeError: one side failed or took too long.
    """
    a, b = link.hosts
    words = [sys.executable, "-I", "-S", wire.__file__]
    with subprocess.Popen(a.command([*words, "answer", a.address]), stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            port = server.stdout.readline().strip()
            said = _run(*b.command([*words, "ask", a.address, port, str(mib * 2**20)]), patience=120.0)
        except subprocess.SubprocessError as error:
            raise RuntimeError(f"the link cannot be measured: {error}; {getattr(error, 'stderr', '')}") from None
        finally:
            server.kill()
    return Measured(**json.loads(said))


def received() -> int:
    """Return the bytes that have come to this rank's host over the link, headers and acknowledgements included.

    Over a link with a delay these are the bytes on the wire. Without one they are those of the kernel's interface, which
    counts the headers of segments that come together, up to 64 KiB, only once: up to 0.7 % fewer.
    """
    if COUNT in os.environ:
        return wire.Count.read(os.environ[COUNT]).wire_bytes
    interface = os.environ["GLOO_SOCKET_IFNAME"]
    lines = Path("/proc/self/net/dev").read_text().splitlines()
    return int(next(line for line in lines if line.strip().startswith(interface + ":")).split(":")[1].split()[0])


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


def _joined(a: Host, b: Host, rate: int) -> tuple[Host, Host]:
    """Join two hosts by a link that the kernel makes alone."""
    _run(
        *("ip", "link", "add", a.interface, "netns", a.name, "type", "veth"),
        *("peer", "name", b.interface, "netns", b.name),
    )
    for host in (a, b):
        _bring_up(host)
        _run(
            *("tc", "-n", host.name, "qdisc", "add", "dev", host.interface, "root"),
            *("tbf", "rate", f"{rate}bit", "burst", "80kb", "latency", "50ms"),
        )
    return a, b


@contextlib.contextmanager
def _wired(a: Host, b: Host, rate: int, delay: float) -> Iterator[tuple[Host, Host]]:
    """Yield the hosts, joined by a link in user space."""
    with contextlib.ExitStack() as opened:
        ends = []
        for host in (a, b):
            ends.append(wire.open_end(host.interface))
            opened.callback(os.close, ends[-1])
            _run("ip", "link", "set", host.interface, "netns", host.name)
            _bring_up(host)
        opened.pop_all()  # the relay closes them
    with wire.relay((ends[0], ends[1]), rate, delay, (a.interface, b.interface)) as (count_a, count_b):
        yield replace(a, count=count_a), replace(b, count=count_b)


def _bring_up(host: Host) -> None:
    _run("ip", "-n", host.name, "address", "add", f"{host.address}/30", "dev", host.interface)
    _run("ip", "-n", host.name, "link", "set", "lo", "up")
    # A relay that has to wait for a CPU must not lose packets: their queue has room for a tenth of a second of small ones.
    _run("ip", "-n", host.name, "link", "set", host.interface, "mtu", str(MTU), "txqueuelen", "10000", "up")


def _delete(host: Host) -> None:
    """Delete a host's namespace, and with it the link."""
    subprocess.run(["ip", "netns", "delete", host.name], capture_output=True, timeout=_PATIENCE, check=False)


def _run(*words: str, patience: float = _PATIENCE) -> str:
    done = subprocess.run(words, capture_output=True, text=True, timeout=patience, check=True, stdin=subprocess.DEVNULL)
    return done.stdout
