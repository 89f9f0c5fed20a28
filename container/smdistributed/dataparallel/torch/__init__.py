"""``smdistributed.dataparallel.torch``: the names that scripts of the data parallel library import."""

from smp_config.version import __version__

__all__ = ["__version__"]
