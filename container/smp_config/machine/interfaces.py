"""The network interfaces of this machine and their addresses, and which of them leads to another host."""

from __future__ import annotations

import fcntl
import socket
import sys

#: The interface that reaches this machine only.
LOOPBACK = "lo0" if sys.platform == "darwin" else "lo"

#: Linux's request for the address of an interface (linux/sockios.h).
#: ``_ADDRESS`` is the address's place in the answer (linux/if.h, a sockaddr_in).
_SIOCGIFADDR = 0x8915
_ADDRESS = slice(20, 24)


def list_addresses() -> dict[str, str]:
    """Return the IPv4 address of each interface, by name; empty if the system does not report them."""
    found = {}
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
            for _, name in socket.if_nameindex():
                try:
                    # A C structure: the name in 15 bytes and a zero, and room for the answer.
                    answer = fcntl.ioctl(asking, _SIOCGIFADDR, name.encode()[:15].ljust(256, b"\0"))
                except OSError:
                    continue  # it has none
                found[name] = socket.inet_ntoa(answer[_ADDRESS])
    except OSError:
        return {}
    return found


def interface_towards(address: str) -> str | None:
    """Return this machine's interface that reaches or has ``address``, or None if it cannot be determined.

    A backend without this setting takes the interface of the machine's own name, which is often loopback.

    Args:
        address: of a host, or its name.
    """
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((address, 9))  # asks the routes of the system; nothing is sent
            own, other = probe.getsockname()[0], probe.getpeername()[0]
    except OSError:
        return None
    known = {found: name for name, found in list_addresses().items()}
    # To itself a machine speaks by loopback, whichever of its addresses it calls; the one that others call is meant.
    name = known.get(other) or known.get(own)
    return None if name == LOOPBACK else name
