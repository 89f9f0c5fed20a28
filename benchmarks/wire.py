"""A wire between two network interfaces that this program carries itself, with a rate and a delay each way.

For kernels that cannot delay packets. Each end is a TUN device, whose packets come to a process of their own, the relay.
It notes when each came, lets it wait for its turn on the line and for the delay, and writes it to the other end. The
kernel hands over segments of one connection together, up to 64 KiB, which keeps the relay cheap: some 2,000 packets per
second make 1 Gbit/s. Such a packet takes as much time on the line as all its segments would, headers included, and
arrives as a whole, when the last of them would. Needs root, /dev/net/tun, and Linux.
"""

from __future__ import annotations

import contextlib
import fcntl
import gc
import json
import mmap
import os
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

DEVICE = "/dev/net/tun"
#: Packets, those within a larger one each counted, that may be on their way in one direction; more are dropped.
BACKLOG = 20_000

# From linux/if_tun.h.
_TUNSETIFF, _TUNSETOFFLOAD = 0x400454CA, 0x400454D0
_IFF_TUN, _IFF_NO_PI, _IFF_VNET_HDR = 0x0001, 0x1000, 0x4000
_TUN_F_CSUM, _TUN_F_TSO4, _TUN_F_TSO_ECN = 0x01, 0x02, 0x08

#: struct virtio_net_hdr: flags, gso_type, hdr_len, gso_size, csum_start, csum_offset.
_PREFIX = struct.Struct("=BBHHHH")
#: Of Ethernet, which a TUN device has not, but a wire has, and each packet of a veth or of tc too.
_ETHERNET = 14
_LARGEST = _PREFIX.size + 65_536
#: Packets that are read at most before it is seen whether others are due.
_AT_ONCE = 16
#: What is counted per direction, each 8 bytes: bytes on the wire, packets, dropped packets, nanoseconds too late.
_COUNTED = 4
#: Seconds for the relay to start, and for anything that the measurement waits for.
_PATIENCE = 60.0


def open_end(name: str) -> int:
    """Make a network interface; the file descriptor through which its packets go.

    The interface may be moved to another namespace, and lives as long as the descriptor.

    Raises:
        OSError: there is no such device, or no right to it.
    """
    end = os.open(DEVICE, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        fcntl.ioctl(end, _TUNSETIFF, struct.pack("=16sH22x", name.encode(), _IFF_TUN | _IFF_NO_PI | _IFF_VNET_HDR))
        fcntl.ioctl(end, _TUNSETOFFLOAD, _TUN_F_CSUM | _TUN_F_TSO4 | _TUN_F_TSO_ECN)
    except OSError:
        os.close(end)
        raise
    return end


@dataclass(frozen=True)
class Count:
    """What has come out of one direction of a wire.

    Attributes:
        wire_bytes: with the headers of every segment, 14 bytes of Ethernet each included.
        packets: as they were handed over; one may hold many segments.
        dropped: segments for which there was no room.
        late: seconds that a packet was delivered after its time, on average.
    """

    wire_bytes: int
    packets: int
    dropped: int
    late: float

    @classmethod
    def read(cls, path: str) -> Count:
        """Read the counts of one direction from their file, in any process of the machine."""
        wire_bytes, packets, dropped, late = struct.unpack("=4Q", Path(path).read_bytes())
        return cls(wire_bytes, packets, dropped, late * 1e-9 / max(1, packets))


@contextlib.contextmanager
def relay(
    ends: tuple[int, int], rate: int, delay: float, names: tuple[str, str] = ("", "")
) -> Iterator[tuple[str, str]]:
    """Carry packets between two ends, in a process that ends with the context and with this process.

    Args:
        ends: of ``open_end``, both up; this context closes them, and the interfaces go.
        rate: bits per second each way.
        delay: seconds each way.
        names: shown among the arguments of the process.

    Yields:
        The file in which what came to each end is counted, for ``Count.read``.

    Raises:
        RuntimeError: the relay did not start.
    """
    files = []
    try:
        for _ in ends:
            # In memory alone: nothing is left behind, whatever happens.
            files.append(os.memfd_create("smp-wire"))
            os.truncate(files[-1], 8 * _COUNTED)
        words = [*map(str, (*ends, *files, rate, delay)), *names]
        process = subprocess.Popen(
            [sys.executable, "-I", "-S", __file__, "relay", *words],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            pass_fds=[*ends, *files],
        )
    finally:
        for descriptor in (*ends, *files):
            os.close(descriptor)
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        started = select.select([process.stdout], [], [], _PATIENCE)[0] and process.stdout.read(1)
        if not started:
            raise RuntimeError(
                f"the relay of the wire did not start within {_PATIENCE:g} s; it ended with {process.poll()}"
            )
        yield f"/proc/{process.pid}/fd/{files[0]}", f"/proc/{process.pid}/fd/{files[1]}"
    finally:
        process.stdin.close()
        process.stdout.close()
        try:
            process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


class _Direction:
    """From one end to the other: the packets that are on their way."""

    def __init__(self, source: int, target: int, rate: int, delay: float, count: memoryview) -> None:
        self.source, self.target, self.delay, self.count = source, target, delay, count
        self.seconds_per_byte = 8 / rate
        self.free = 0.0
        self.segments = 0
        # Arrival, bytes on the wire, segments, and the content: a buffer and how much of it.
        self.waiting: deque[tuple[float, int, int, memoryview, int]] = deque()
        # New memory of this size would cost more than the copies.
        self.buffers: list[memoryview] = []

    def take(self) -> None:
        """Read what there is, and give each packet its time of arrival."""
        for _ in range(_AT_ONCE):
            buffer = self.buffers.pop() if self.buffers else memoryview(bytearray(_LARGEST))
            try:
                length = os.readv(self.source, [buffer])
            except BlockingIOError:
                self.buffers.append(buffer)
                return
            now = time.monotonic()
            size, segments = on_the_wire(buffer[:length])
            if self.segments + segments > BACKLOG:
                self.count[2] += segments
                self.buffers.append(buffer)
                continue
            self.free = max(now, self.free) + size * self.seconds_per_byte
            self.segments += segments
            self.waiting.append((self.free + self.delay, size, segments, buffer, length))

    def deliver(self) -> float:
        """Write all packets whose time has come; the seconds until the next one, or infinity."""
        waiting, count = self.waiting, self.count
        while waiting:
            arrival, size, segments, buffer, length = waiting[0]
            late = time.monotonic() - arrival
            if late < 0:
                return -late
            waiting.popleft()
            self.segments -= segments
            os.write(self.target, buffer[:length])
            self.buffers.append(buffer)
            count[0] += size
            count[1] += 1
            count[3] += int(late * 1e9)
        return float("inf")


def on_the_wire(packet: bytes | memoryview) -> tuple[int, int]:
    """Return the bytes and segments that a packet, with its virtio-net header, would be on an Ethernet."""
    _, kind, _, gso_size, transport, _ = _PREFIX.unpack_from(packet)
    size = len(packet) - _PREFIX.size
    if not gso_size or not kind:
        return size + _ETHERNET, 1
    headers = transport + 4 * (packet[_PREFIX.size + transport + 12] >> 4)  # to the end of that of TCP
    segments = max(1, -(-(size - headers) // gso_size))
    return size + (segments - 1) * headers + segments * _ETHERNET, segments


def _carry(a: int, b: int, count_a: int, count_b: int, rate: int, delay: float) -> None:
    """Relay until the standard input ends, which is when the parent process does."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides
    # Sleep to the microsecond; by default the kernel may wake a process 50 of them later.
    with contextlib.suppress(OSError):
        Path("/proc/self/timerslack_ns").write_text("1")
    gc.disable()  # nothing here goes in circles
    counts = [memoryview(mmap.mmap(count, 8 * _COUNTED)).cast("Q") for count in (count_a, count_b)]
    directions = (_Direction(a, b, rate, delay, counts[1]), _Direction(b, a, rate, delay, counts[0]))
    lifeline = sys.stdin.fileno()
    os.write(sys.stdout.fileno(), b".")
    while True:
        rest = min(direction.deliver() for direction in directions)
        ready, _, _ = select.select([a, b, lifeline], [], [], None if rest == float("inf") else rest)
        if lifeline in ready:
            return
        for direction in directions:
            if direction.source in ready:
                direction.take()


def answer(address: str) -> None:
    """Print the port of a new server, and answer one client of ``ask``; one side of a measurement."""
    with socket.create_server((address, 0)) as server:
        server.settimeout(_PATIENCE)
        print(server.getsockname()[1], flush=True)
        peer, _ = server.accept()
    with peer:
        peer.settimeout(_PATIENCE)
        peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        times, size = _receive_struct(peer, "=QQ")
        for _ in range(times):
            peer.sendall(_receive(peer, 1))
        peer.sendall(struct.pack("=d", _receive_bulk(peer, size)))
        peer.sendall(struct.pack("=d", _both_ways(peer, size)))


def ask(address: str, port: int, size: int, times: int = 31) -> dict[str, float]:
    """Measure what lies between this host and that of ``answer``.

    Returns:
        ``round_trip``: seconds of one byte there and back, the median of ``times``; ``one_way``, ``there`` and ``back``:
        bits per second of ``size`` bytes over TCP from the first ``send`` to the last ``recv``, first one way, then
        both ways at the same time.
    """
    trips = []
    with socket.create_connection((address, port), timeout=_PATIENCE) as peer:
        peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        peer.sendall(struct.pack("=QQ", times, size))
        for _ in range(times):
            start = time.monotonic()
            peer.sendall(b".")
            _receive(peer, 1)
            trips.append(time.monotonic() - start)
        _send_bulk(peer, size)
        (one_way,) = _receive_struct(peer, "=d")
        back = _both_ways(peer, size)
        (there,) = _receive_struct(peer, "=d")
    return {"round_trip": sorted(trips)[times // 2], "one_way": one_way, "there": there, "back": back}


def _both_ways(peer: socket.socket, size: int) -> float:
    sender = threading.Thread(target=_send_bulk, args=(peer, size), daemon=True)
    sender.start()
    rate = _receive_bulk(peer, size)
    sender.join()
    return rate


def _send_bulk(peer: socket.socket, size: int) -> None:
    """Send the starting time and ``size`` bytes; all processes of one machine share one monotonic clock."""
    peer.sendall(struct.pack("=d", time.monotonic()))
    block = bytes(2**20)
    for sent in range(0, size, len(block)):
        peer.sendall(block[: size - sent])


def _receive_bulk(peer: socket.socket, size: int) -> float:
    """Return the bits per second that ``_send_bulk`` sends."""
    (start,) = _receive_struct(peer, "=d")
    room = memoryview(bytearray(2**20))
    left = size
    while left:
        came = peer.recv_into(room[:left])
        if not came:
            raise ConnectionError(f"the other side ended with {left} of {size} bytes still to come")
        left -= came
    return 8 * size / (time.monotonic() - start)


def _receive_struct(peer: socket.socket, form: str) -> tuple:
    return struct.unpack(form, _receive(peer, struct.calcsize(form)))


def _receive(peer: socket.socket, size: int) -> bytes:
    came = peer.recv(size, socket.MSG_WAITALL)
    if len(came) != size:
        raise ConnectionError(f"the other side ended after {len(came)} of {size} bytes")
    return came


def main(what: str, *words: str) -> None:
    if what == "relay":
        a, b, count_a, count_b, rate = map(int, words[:5])
        _carry(a, b, count_a, count_b, rate, float(words[5]))
    elif what == "answer":
        answer(words[0])
    elif what == "ask":
        print(json.dumps(ask(words[0], int(words[1]), int(words[2]))))


if __name__ == "__main__":
    main(*sys.argv[1:])
