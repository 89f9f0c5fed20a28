"""Emulated CUDA devices that check how a program orders its work: streams, events, freed memory, reads by the host."""

from smp_emulation.checked.installed import Emulation, emulated, install, report, uninstall
from smp_emulation.checked.streams.faults import StreamFault

__all__ = ["Emulation", "StreamFault", "emulated", "install", "report", "uninstall"]
