"""Importing this module registers the backend: ``torch.distributed.init_process_group(backend="smddp")``."""

from smp_runtime.smddp import BACKEND, register

register()

__all__ = ["BACKEND"]
