"""The emulation in place of ``torch.cuda``, for all threads of a process."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
import torch._dynamo  # shapes of some operations need it, and it does not load while there seem to be GPUs

from smp_config.machine import emulation
from smp_config.machine.launchers import LOCAL_SIZE_VARIABLES
from smp_emulation.checked import collectives, communicators, composites, cuda_names
from smp_emulation.checked.backward import BackwardThread
from smp_emulation.checked.operations import Operations
from smp_emulation.checked.patches import Patches
from smp_emulation.checked.streams import faults
from smp_emulation.checked.streams.device import Devices
from smp_emulation.checked.tensors import TensorNames
from smp_emulation.errors import CudaCallError

if TYPE_CHECKING:
    from smp_emulation.gpu_model.model import GpuModel


class Emulation:
    """The emulation that :func:`install` has installed.

    Attributes:
        devices: the emulated ones.
    """

    def __init__(self, seed: int, count: int) -> None:
        self.devices = Devices(seed, count)
        self._patches = Patches()
        self._mode = Operations(self.devices)
        self._backward = BackwardThread(self.devices)
        faults.found.clear()
        cuda_names.install(self.devices, self._patches)
        TensorNames(self.devices, self._patches).install()
        composites.install(self.devices, self._patches)
        collectives.install(self.devices, self._patches)
        self._engine()
        self._patches.spread()
        # A GPU has none of oneDNN's kernels, which recurrent layers would take here; on the meta device these have other results.
        self._has_onednn = torch.backends.mkldnn.enabled
        torch.backends.mkldnn.enabled = False  # type: ignore[assignment]
        self._patches.set(
            torch.backends.cudnn, "is_acceptable", lambda tensor: False
        )  # else it warns of a build without cuDNN
        self._patches.set(threading.Thread, "start", self._started(threading.Thread.start))
        self._mode.__enter__()

    @property
    def waits(self) -> Counter[tuple[str, str]]:
        """Return how often the host has waited for a device, by kind and line."""
        return self.devices.waits

    @property
    def model(self) -> GpuModel:
        """Return memory, contexts and launches of the devices, as a GPU shows them."""
        return self.devices.model

    @property
    def faults(self) -> list[str]:
        """Return the faults that were found, even if the program caught the errors."""
        return faults.found

    def _engine(self) -> None:
        backward, graph = self._backward, torch.autograd.graph
        own = graph._engine_run_backward
        runs = lambda *args, **kwargs: backward.run(own, *args, **kwargs)  # noqa: E731 - set under two names
        self._patches.set(graph, "_engine_run_backward", runs)
        self._patches.set(torch.autograd, "_engine_run_backward", runs)
        # Past these two: modules that call the engine itself. Those that are imported already have its function by name.
        engine = _Engine(torch.autograd.Variable._execution_engine, backward)
        self._patches.in_modules(engine.own.run_backward, engine.run_backward)
        self._patches.set(torch.autograd.Variable, "_execution_engine", engine)

    def _started(self, start: Callable[[threading.Thread], None]) -> Callable[[threading.Thread], None]:
        """Wrap ``Thread.start``, so that new threads run in the same mode."""
        mode = self._mode

        def started(thread: threading.Thread) -> None:
            run = thread.run

            def inside() -> None:
                with mode:
                    run()

            thread.run = inside  # type: ignore[method-assign]
            start(thread)

        return started

    def close(self) -> None:
        """Put all back."""
        self._mode.__exit__(None, None, None)
        self._patches.undo()
        torch.backends.mkldnn.enabled = self._has_onednn
        self._backward.close()
        communicators.forget()
        self.devices.close()


class _Engine:
    """PyTorch's engine, whose backward passes run on the thread for them."""

    def __init__(self, own: Any, backward: BackwardThread) -> None:
        self.own = own
        self._backward = backward

    def run_backward(self, *args: Any, **kwargs: Any) -> Any:
        return self._backward.run(self.own.run_backward, *args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.own, name)


_installed: Emulation | None = None


def install(seed: int | None = None, devices: int | None = None) -> Emulation:
    """Let this process see emulated CUDA devices from now on.

    Args:
        seed: draws the order in which work is executed, among those that streams and events allow; 0 if not given.
        devices: how many; one for each rank of this machine if not given.

    Raises:
        CudaCallError: there are GPUs, or it is installed already.
    """
    global _installed
    if _installed is not None:
        raise CudaCallError("emulated devices are installed already; uninstall() them first")
    if torch.cuda.is_available():
        raise CudaCallError("this machine has GPUs; emulated devices are for machines without")
    if devices is None:
        devices = emulation.device_count(os.environ)
    if devices is None:
        devices = max(1, int(next((os.environ[name] for name in LOCAL_SIZE_VARIABLES if os.environ.get(name)), "1")))
    _installed = Emulation(seed or 0, devices)
    if emulation.wants_report(os.environ):
        _installed.devices.model.report_at_exit()
    return _installed


def uninstall() -> None:
    """Remove the emulated devices; tensors that are left on them have no elements any more."""
    global _installed
    if _installed is not None:
        installed, _installed = _installed, None
        installed.close()


def report() -> None:
    """Print the faults that were found to stderr when the process ends, because its program may have caught the errors."""
    for message in dict.fromkeys(faults.found):
        print(f"[smp] checked streams: {message}", file=sys.stderr, flush=True)


@contextlib.contextmanager
def emulated(seed: int = 0, devices: int | None = 1) -> Iterator[Emulation]:
    """Emulate devices in the block; a fault that the program has caught there is raised at the end.

    Raises:
        StreamFault: at the end, the first fault that the program has caught.
    """
    installed = install(seed, devices)
    try:
        yield installed
        installed.devices.wait_on_host(
            "the end", [lane for lanes in installed.devices.lanes.values() for lane in lanes]
        )
        if installed.faults:
            raise faults.StreamFault(installed.faults[0])
    finally:
        uninstall()
