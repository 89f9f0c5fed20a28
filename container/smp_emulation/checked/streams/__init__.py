"""Streams of an emulated device: their queues of work, clocks, memory, and faults in their use."""
