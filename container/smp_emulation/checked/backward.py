"""Backward passes run on a thread of the device, as PyTorch's engine does on a GPU."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch.overrides import _get_current_function_mode_stack
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from smp_emulation.checked.streams.sites import called_from, find_site

if TYPE_CHECKING:
    from smp_emulation.checked.streams.device import Devices


class BackwardThread:
    """One thread for all backward passes of a process, one after the other.

    On a GPU, one thread per device runs the backward pass of everything there. So a hook or a backward function does not see the
    thread-local values of the thread that called ``backward``. If it waits there for another backward pass, it waits forever.
    Inside ``torch.autograd.set_multithreading_enabled(False)`` the caller's thread is used.
    """

    def __init__(self, devices: Devices) -> None:
        self._devices = devices
        self._passes: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        # One thread for all passes, as autograd has one per device: their order is that of their calls.
        self._thread = threading.Thread(target=self._serve, name="emulated-backward", daemon=True)
        self._thread.start()

    def run(self, own: Callable[..., Any], outputs: Any, *args: Any, **kwargs: Any) -> Any:
        """Run the engine's call ``own(outputs, …)`` on the thread, and return when it has ended."""
        roots = [each for each in outputs if isinstance(each, torch.Tensor)]
        if (
            not torch._C._is_multithreading_enabled()
            or threading.current_thread() is self._thread
            or all(self._devices.device_of(root) is None for root in roots)
        ):
            return own(outputs, *args, **kwargs)
        # Modes, devices and streams belong to a thread: the pass must see those of its caller.
        modes = [*_get_current_dispatch_mode_stack(), *_get_current_function_mode_stack()]
        state, line = dict(self._devices.thread.__dict__), find_site()
        grad = torch.is_grad_enabled()
        # As in PyTorch, the caller waits while another thread runs the pass.
        ended = threading.Event()
        outcome: list[Any] = []

        def run() -> None:
            self._devices.thread.device = state.get("device", 0)
            self._devices.thread.current = dict(state["current"])
            for mode in modes:
                mode.__enter__()
            try:
                with called_from(line), torch.set_grad_enabled(grad):
                    outcome[:] = True, own(outputs, *args, **kwargs)
            except BaseException as error:  # handed to the thread that called backward, which raises it
                outcome[:] = False, error
            finally:
                for mode in reversed(modes):
                    mode.__exit__(None, None, None)
                ended.set()

        self._passes.put(run)
        ended.wait()
        worked, result = outcome
        if not worked:
            raise result
        return result

    def close(self) -> None:
        """End the thread."""
        self._passes.put(None)
        self._thread.join(5)

    def _serve(self) -> None:
        while (run := self._passes.get()) is not None:
            run()
