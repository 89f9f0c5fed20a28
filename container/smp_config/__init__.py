"""Configuration: typed parameters, topology, job settings and limits, in pure Python, read by client and ranks."""

from typing import TYPE_CHECKING

from smp_config.lazy_names import lazy_names

if TYPE_CHECKING:
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

# Models of settings take longer to build than all else here, and a process needs few of them.
__getattr__, __dir__ = lazy_names(
    __name__,
    {
        "smp_config.errors": ("ConfigError",),
        "smp_config.job": ("DataParallelSettings", "JobSettings", "MpiSettings"),
        "smp_config.parameters": ("ModelParallelParameters",),
        "smp_config.topology": ("Coordinates", "Group", "Topology"),
        "smp_config.version": ("__version__",),
    },
)
