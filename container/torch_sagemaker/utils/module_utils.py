"""Functions on modules."""

from smp_version2.modules import empty_module_params, move_buffers_to_device

__all__ = ["empty_module_params", "move_buffers_to_device"]
