"""``smp.data``: data that a job reads exactly once, however often it is stopped and on however many ranks it goes on."""

from smp_runtime.data.loader import DataLoader
from smp_runtime.data.sampler import DistributedSampler
from smp_runtime.data.stream import DistributedStream

__all__ = ["DataLoader", "DistributedSampler", "DistributedStream"]
