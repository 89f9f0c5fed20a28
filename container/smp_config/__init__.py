"""The ground floor: typed parameters, topology, job settings and limits, in pure Python, read by client and ranks."""

from smp_config.errors import ConfigError
from smp_config.job import DataParallelSettings, JobSettings, MpiSettings
from smp_config.parameters import ModelParallelParameters
from smp_config.topology import Coordinates, Group, Topology
from smp_config.version import __version__

__all__ = [
    "ConfigError",
    "Coordinates",
    "DataParallelSettings",
    "Group",
    "JobSettings",
    "ModelParallelParameters",
    "MpiSettings",
    "Topology",
    "__version__",
]
