"""``smdistributed.modelparallel``: the model parallel library's public names."""

from smp_config.version import __version__

__all__ = ["__version__"]
