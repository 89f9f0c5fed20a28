"""A collective under way, as both Python and PyTorch's C++ code wait for it."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
from torch.distributed.distributed_c10d import Work


class FutureWork(Work):
    """Completed by a future: on CUDA when its stream gets there, which :meth:`wait` does not wait for on the CPU.

    Args:
        future: has the outputs, or the error, when the collective is over.
    """

    def __init__(self, future: torch.futures.Future[Any]) -> None:
        super().__init__()
        self._future = future

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait for the end.

        Raises:
            RuntimeError: the collective failed, also because another rank was lost or did not come in time.
        """
        self._future.wait()
        return True

    def is_completed(self) -> bool:
        return self._future.done()

    def is_success(self) -> bool:
        return self._future.done() and self.exception() is None

    def exception(self) -> Any:
        """The error with which the collective ended, if any."""
        if self._future.done():
            try:
                self._future.value()
            except Exception as error:
                return error
        return None

    def result(self) -> Any:
        """The output tensors."""
        return self._future.value()

    def synchronize(self) -> None:
        self.wait()

    def get_future(self) -> torch.futures.Future[Any]:
        return self._future
