"""A mode for PyTorch's functions while a module runs, entered and left by the module's calls."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

from torch.overrides import TorchFunctionMode

if TYPE_CHECKING:
    from torch import nn

    from smp_runtime.tensor_parallel.group import TensorGroup


class _Entered(threading.local):
    """Calls of a thread that have entered the mode, and not left it."""

    count = 0


class DuringCalls(TorchFunctionMode):
    """A mode that is on while the modules that it watches run.

    Args:
        group: the ranks that share the block around them.
    """

    def __init__(self, group: TensorGroup) -> None:
        super().__init__()
        self.group = group
        self._entered = _Entered()

    def watch(self, module: nn.Module) -> None:
        """Begin with the next call of ``module``."""
        module.register_forward_pre_hook(self.enter)
        module.register_forward_hook(self.leave, always_call=True)

    def enter(self, module: nn.Module, args: Any) -> None:
        """Enter the mode; PyTorch's hook."""
        self.__enter__()
        self._entered.count += 1

    def leave(self, module: nn.Module, args: Any, result: Any) -> None:
        """Leave the mode; PyTorch's hook, also after a call that failed, maybe before it came to :meth:`enter`."""
        if self._entered.count:
            self._entered.count -= 1
            self.__exit__(None, None, None)

    def __deepcopy__(self, memo: Any) -> DuringCalls:
        return self
