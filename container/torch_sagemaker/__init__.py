"""``import torch.sagemaker as tsm``: the documented names of version 2; the logic is in ``smp_version2``."""

from smp_version2.job import init, is_initialized, shutdown
from smp_version2.state import state
from smp_version2.transform import transform

__all__ = ["init", "is_initialized", "shutdown", "state", "transform"]
