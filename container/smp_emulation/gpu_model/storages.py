"""The model under the plain emulation: storages of CPU tensors count as memory of the thread's current device.

Tensors of the plain emulation do not know a device. So all that operations touch counts as memory of the device, also what a
script keeps in main memory. Checked devices know which tensors are theirs.
"""

from __future__ import annotations

import importlib
import os
import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack
from torch.utils._pytree import tree_flatten

from smp_config.machine import emulation
from smp_emulation import devices
from smp_emulation.covered import ordering
from smp_emulation.gpu_model.memory_calls import memory_calls
from smp_emulation.gpu_model.model import GpuModel, stream_of_pool

if TYPE_CHECKING:
    from smp_emulation.gpu_model.allocator import CachingAllocator, Chunk

_META = torch.device("meta")
#: Modules with calls about memory.
_MODULES = ("torch.cuda", "torch.cuda.memory", "torch.accelerator", "torch.accelerator.memory")


class StorageMode(TorchDispatchMode):
    """Counts the storages that operations make, and the operations.

    Args:
        model: that of the process's devices.
    """

    def __init__(self, model: GpuModel) -> None:
        super().__init__()
        self._model = model
        #: By storage. The garbage collector removes entries.
        self._alive: dict[int, _Held] = {}

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # or the compiler would be imported at the first operation

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = _tensors((args, kwargs))
        for tensor in given:
            # Some are made without an operation, by torch.from_numpy for example.
            self._note(tensor)
        # A factory function: its size is known before the host has to find the memory.
        if not given and "device" in kwargs:
            self._refuse_too_large(function, args, kwargs)
        result = function(*args, **kwargs)
        made = [tensor for tensor in _tensors(result) if self._note(tensor)]
        if made or _gives_new_elements(function):
            self._model.count_work(function, args, kwargs, given, made)
        return result

    def _refuse_too_large(self, function: Any, args: Any, kwargs: Any) -> None:
        """Raise torch.OutOfMemoryError for a new tensor that no device has room for, before the host has to find it."""
        device = kwargs["device"]
        if device is None or torch.device(device).type != "cpu":
            return
        forms = function(*args, **_on_meta(kwargs))
        size = sum(tensor.nbytes for tensor in _tensors(forms))
        self._model.allocator(devices.current_index()).raise_if_hopeless(size)

    def _note(self, tensor: torch.Tensor) -> bool:
        """Count the storage of a tensor, and return whether it is a new one."""
        if tensor.device.type != "cpu" or tensor.layout is not torch.strided:
            return False
        try:
            storage = tensor.untyped_storage()
        except (NotImplementedError, RuntimeError):  # a subclass without elements of its own
            return False
        if storage._cdata in self._alive or not storage.nbytes():
            return False
        index = devices.current_index()
        stream = ordering.current_stream(index).stream_id
        self._allocate(storage, self._model.allocator(index), stream_of_pool(stream))
        return True

    def _allocate(self, storage: torch.UntypedStorage, allocator: CachingAllocator, stream: int) -> None:
        key, alive = storage._cdata, self._alive
        held = _Held(allocator, stream, allocator.allocate(storage.nbytes(), stream))

        def died(_: object) -> None:
            if alive.get(key) is held:
                del alive[key]
            held.release()

        # Weakly, so that the memory counts as free when the last tensor is gone.
        held.reference = weakref.ref(storage, died)
        alive[key] = held

    def resized(self, storage: torch.UntypedStorage) -> None:
        """Count a storage again after it was emptied or filled in place."""
        held = self._alive.get(storage._cdata)
        if held is not None:
            held.release()
            if storage.nbytes():
                held.chunk = held.allocator.allocate(storage.nbytes(), held.stream)


@dataclass(eq=False)
class _Held:
    """The memory of a storage.

    Attributes:
        chunk: None while the storage is empty.
        reference: hears of the end of the storage.
    """

    allocator: CachingAllocator
    stream: int
    chunk: Chunk | None
    reference: weakref.ref[torch.UntypedStorage] | None = None

    def release(self) -> None:
        chunk, self.chunk = self.chunk, None
        if chunk is not None:
            self.allocator.release(chunk)


class PlainModel:
    """The model that is installed in the plain emulation, if the environment asks for it.

    Args:
        replace: sets an attribute of a module until the emulation ends.
    """

    def __init__(self, replace: Callable[[Any, str, Any], None]) -> None:
        self.model = GpuModel.from_environment(devices.count())
        self._mode = mode = StorageMode(self.model)
        if emulation.wants_report(os.environ):
            self.model.report_at_exit()
        calls = memory_calls(self.model, devices.index_of)
        calls["get_memory_info"] = calls["mem_get_info"]
        calls["get_device_properties"] = self._properties
        for way in _MODULES:
            _replace_memory_calls(way, calls, replace)
        start, resize, contexts = threading.Thread.start, torch.UntypedStorage.resize_, self.model.contexts

        def started(thread: threading.Thread) -> None:
            if mode in _get_current_dispatch_mode_stack():
                run = thread.run
                thread.run = lambda: _run_in(mode, run)  # type: ignore[method-assign]
            start(thread)

        def resized(storage: torch.UntypedStorage, size: int) -> torch.UntypedStorage:
            result = resize(storage, size)
            mode.resized(storage)
            return result

        replace(threading.Thread, "start", started)
        replace(torch.UntypedStorage, "resize_", resized)
        devices.watch_use(contexts.use, contexts.choose)
        mode.__enter__()

    def _properties(self, device: Any = None) -> Any:
        found = devices.device_properties(device)
        found.total_memory = self.model.capacity
        return found

    def close(self) -> None:
        """Count no more."""
        self._mode.__exit__(None, None, None)
        devices.watch_use(None, None)
        self.model.close()


def _replace_memory_calls(
    way: str, calls: dict[str, Callable[..., Any]], replace: Callable[[Any, str, Any], None]
) -> None:
    """Set the calls about memory that a module of PyTorch has, if this release has the module."""
    try:
        module = importlib.import_module(way)
    except ImportError:
        return
    for name, call in calls.items():
        if hasattr(module, name):
            replace(module, name, call)


def is_wanted() -> bool:
    """Return whether the environment asks for the model."""
    return emulation.memory_limit(os.environ) is not None or emulation.wants_report(os.environ)


def _run_in(mode: StorageMode, run: Callable[[], None]) -> None:
    with mode:
        run()


def _gives_new_elements(function: Any) -> bool:
    """Return whether an operation makes a tensor, or writes into an argument; views do neither."""
    for returned in function._schema.returns:
        alias = returned.alias_info
        is_new = alias is None
        if is_new or alias.is_write:
            return True
    return False


def _tensors(value: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_flatten(value)[0] if isinstance(leaf, torch.Tensor)]


def _on_meta(kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of a factory for the meta device."""
    left_out = ("pin_memory", "generator")
    return {**{name: value for name, value in kwargs.items() if name not in left_out}, "device": _META}
