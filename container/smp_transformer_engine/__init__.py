"""``import transformer_engine`` in jobs of version 2 where it is not installed: the names of public scripts, with emulated FP8.

``torch_sagemaker_finder`` finds it after all other packages.
"""

from . import common, pytorch

__version__ = "0+emulated"

__all__ = ["__version__", "common", "pytorch"]
