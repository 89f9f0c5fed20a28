"""The wire in user space between two hosts in network namespaces: its delay, its rate, its count, and that it goes away."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import wire
from namespaces import measure, two_hosts, why_not

pytestmark = pytest.mark.timeout(60)

RATE, DELAY, MIB = 200_000_000, 0.01, 4

PARENT = """
import sys, time
sys.path.insert(0, {benchmarks!r})
from namespaces import two_hosts
with two_hosts({rate}, {delay}) as link:
    print(*(host.name for host in link.hosts), *(host.interface for host in link.hosts), flush=True)
    time.sleep(60)
"""


@pytest.fixture
def _wires():
    """Such wires can be made here."""
    if (reason := why_not(DELAY)) is not None:
        pytest.skip(reason)


def relays(interface: str) -> list[str]:
    """The relays with this interface, among all processes."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            words = (folder / "cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        if os.fsencode(wire.__file__) in words and interface.encode() in words:
            found.append(folder.name)
    return found


def namespaces() -> list[str]:
    shown = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout
    return [line.split()[0] for line in shown.splitlines() if line.strip()]


def interfaces() -> set[str]:
    return set(os.listdir("/sys/class/net"))


def until_gone(interface: str, seconds: float = 20.0) -> bool:
    deadline = time.monotonic() + seconds
    while relays(interface):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


@pytest.mark.job
@pytest.mark.usefixtures("_wires")
def test_delay_rate_and_count():
    with two_hosts(RATE, DELAY) as link:
        a, b = link.hosts
        assert len(relays(a.interface)) == 1
        assert a.count is not None
        before = wire.Count.read(a.count)
        found = measure(link, MIB)
        after = wire.Count.read(a.count)
    assert found.round_trip >= 2 * DELAY
    # From before the first byte left to after the last one came: nothing but a fault could make these higher.
    assert max(found.one_way, found.there, found.back) <= RATE
    assert min(found.one_way, found.there, found.back) > 0
    assert after.dropped == before.dropped
    # What came to the first host: twice the bytes, 20 + 32 + 14 of headers for each segment.
    came, sent = after.wire_bytes - before.wire_bytes, 2 * MIB * 2**20
    assert came >= sent * (1 + 66 / (9001 - 52)) - 66
    assert came <= 1.1 * sent
    # Super-packets, or the relay would be dear.
    assert after.packets - before.packets < sent / 9001
    assert not relays(a.interface)
    assert not {a.name, b.name} & set(namespaces())
    assert not {a.interface, b.interface} & interfaces()


@pytest.mark.job
@pytest.mark.usefixtures("_wires")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_the_relay_ends_with_its_parent(number):
    script = PARENT.format(benchmarks=str(Path(wire.__file__).parent), rate=RATE, delay=DELAY)
    names: list[str] = []
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) as parent:
        try:
            assert parent.stdout is not None
            *names, a, b = parent.stdout.readline().split()
            assert len(relays(a)) == 1
            parent.send_signal(number)
            parent.wait(timeout=20)
            assert until_gone(a)
            assert not {a, b} & interfaces()
            if number == signal.SIGTERM:
                assert not set(names) & set(namespaces())
        finally:
            parent.kill()
            for name in set(names) & set(namespaces()):
                # Who is killed outright cannot take them along.
                subprocess.run(["ip", "netns", "delete", name], check=True)


def test_bytes_on_the_wire():
    tcp = bytes(20) + bytes(12) + bytes([8 << 4]) + bytes(19)  # with 12 bytes of options
    plain = wire._PREFIX.pack(0, 0, 0, 0, 0, 0) + tcp + bytes(100)
    assert wire.on_the_wire(plain) == (14 + 52 + 100, 1)
    for kind in (1, 1 | 0x80):  # with and without ECN
        three = wire._PREFIX.pack(1, kind, 52, 1000, 20, 16) + tcp + bytes(2001)
        assert wire.on_the_wire(memoryview(three)) == (2001 + 3 * (14 + 52), 3)


def test_a_backlog_has_an_end(monkeypatch):
    monkeypatch.setattr(wire, "BACKLOG", 3)
    ours, theirs = os.pipe()
    os.set_blocking(ours, False)
    count = memoryview(bytearray(32)).cast("Q")
    direction = wire._Direction(ours, -1, 1000, 1000.0, count)
    packet = wire._PREFIX.pack(0, 0, 0, 0, 0, 0) + bytes(100)
    for _ in range(5):
        os.write(theirs, packet)
        direction.take()
    os.close(ours)
    os.close(theirs)
    assert (direction.segments, len(direction.waiting), list(count)) == (3, 3, [0, 0, 2, 0])
    first, second = (entry[0] for entry in list(direction.waiting)[:2])
    assert second - first == pytest.approx(8 * 114 / 1000)


@pytest.mark.usefixtures("_wires")
def test_what_is_missing_is_said(monkeypatch):
    monkeypatch.setattr(wire, "DEVICE", "/dev/net/none")
    assert why_not(DELAY) == "/dev/net/none (kernel module tun) is missing, and a link with a delay needs it"
    assert "tun" not in (why_not() or "")
