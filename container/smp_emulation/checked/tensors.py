"""Attributes of ``torch.Tensor`` for tensors on emulated devices, and moves between these devices and the host."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch.overrides import handle_torch_function, has_torch_function_unary
from torch.utils._python_dispatch import _disable_current_modes as without_modes

from smp_emulation.checked.copies import Copies
from smp_emulation.checked.streams.device import ON_DEVICE
from smp_emulation.checked.streams.memory import StoragePlace
from smp_emulation.errors import CudaCallError

if TYPE_CHECKING:
    from smp_emulation.checked.patches import Patches
    from smp_emulation.checked.streams.device import Devices
    from smp_emulation.checked.streams.streams import EmulatedStream

_CPU = torch.device("cpu")
_groups = torch._C._group_tensors_by_device_and_dtype


class TensorNames:
    """The attributes of ``torch.Tensor`` for emulated devices.

    Args:
        devices: the devices that tensors are on.
        patches: restores the original attributes.
    """

    def __init__(self, devices: Devices, patches: Patches) -> None:
        self._devices = devices
        self._patches = patches
        self._copies = Copies(devices)
        self._own_device = torch.Tensor.device.__get__
        self._move = _moving(self)

    def install(self) -> None:
        """Replace the attributes and functions of PyTorch."""
        tensor, own = torch.Tensor, {name: getattr(torch.Tensor, name) for name in _READS}
        self._patches.set(tensor, "device", property(self._device))
        self._patches.set(tensor, "is_cuda", property(lambda t: self._device(t).type == "cuda"))
        self._patches.set(tensor, "is_cpu", property(lambda t: self._device(t).type == "cpu"))
        self._patches.set(tensor, "get_device", lambda t: -1 if (n := self._number(t)) is None else n)
        methods: dict[str, Callable[..., Any]] = {
            "to": self._to(tensor.to),
            "cpu": lambda t, memory_format=torch.preserve_format: t.to("cpu"),
            "cuda": self._cuda,
            "type_as": lambda t, other: t.to(other),
            "record_stream": self._record_stream,
            "is_pinned": lambda t, device=None: self._is_pinned(t),
            "pin_memory": lambda t, device=None: self._pin_memory(t),
        }
        for name, function in {
            **methods,
            **{name: self._reading(name, function) for name, function in own.items()},
        }.items():
            self._patches.set(tensor, name, _overridable(name, function))
        self._patches.set(tensor, "__deepcopy__", self._deepcopy(tensor.__deepcopy__))
        self._patches.set(tensor, "__reduce_ex__", self._reduce(tensor.__reduce_ex__))
        wrapper = staticmethod(self._without_elements(tensor._make_wrapper_subclass))
        self._patches.everywhere(tensor, "_make_wrapper_subclass", wrapper)
        self._patches.set(torch, "tensor", self._factory(torch.tensor))
        self._patches.set(torch, "as_tensor", self._factory(torch.as_tensor))
        self._patches.set(torch._C, "_group_tensors_by_device_and_dtype", self._grouped(_groups))
        self._patches.set(torch.UntypedStorage, "resize_", self._resize(torch.UntypedStorage.resize_))

    def _number(self, tensor: torch.Tensor) -> int | None:
        return self._devices.device_of(tensor)

    def _device(self, tensor: torch.Tensor) -> torch.device:
        number = self._number(tensor)
        if number is not None:
            return torch.device("cuda", number)
        with torch._C.DisableTorchFunctionSubclass():
            device: torch.device = self._own_device(tensor)
        return device

    def _without_elements(self, own: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap the constructor of tensor subclasses that keep their elements elsewhere.

        PyTorch's own constructor would look for the device's own code.
        """

        def make(kind: Any, *args: Any, device: Any = None, **kwargs: Any) -> Any:
            if device is None or torch.device(device).type != "cuda":
                return own(kind, *args, device=device, **kwargs)
            made = own(kind, *args, device="cpu", **kwargs)
            made.__dict__[ON_DEVICE] = self._devices.index(device)
            return made

        return make

    # -- moves -----------------------------------------------------------------------------------------------------

    def _to(self, own: Callable[..., Any]) -> Callable[..., Any]:
        def to(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
            if args and isinstance(args[0], torch.Tensor):
                args = (args[0].device, args[0].dtype, *args[1:])
            elif "other" in kwargs:
                other = kwargs.pop("other")
                args = (other.device, other.dtype)
            forced = kwargs.pop("copy", False)
            # PyTorch's parser takes no ``copy``, the flag behind ``non_blocking``.
            if len(args) > 1 and isinstance(args[-1], bool) and isinstance(args[-2], bool):
                forced, args = args[-1], args[:-1]
            device, dtype, non_blocking, memory_format = torch._C._nn._parse_to(*args, **kwargs)
            here = self._number(tensor)
            there = here
            if device is not None:
                there = self._devices.index(device) if device.type == "cuda" else None
            if device is not None and device.type not in ("cpu", "cuda"):
                result: torch.Tensor = own(tensor, *args, **kwargs)
                return result
            if there == here:
                rest = {"dtype": dtype or tensor.dtype, "non_blocking": non_blocking, "copy": forced}
                if memory_format is not None:
                    rest["memory_format"] = memory_format
                return own(tensor, **rest)
            moved: torch.Tensor = self._move.apply(tensor, there, not non_blocking)
            return moved if dtype in (None, moved.dtype) else own(moved, dtype=dtype)

        return to

    def move(self, tensor: torch.Tensor, number: int | None, waits: bool) -> torch.Tensor:
        """Return a copy of the tensor on device ``number``, or in host memory if ``number`` is None."""
        return self._copies.moved(tensor.detach(), number, waits=waits)

    def number(self, tensor: torch.Tensor) -> int | None:
        """Return the index of the tensor's device, or None for the host."""
        return self._number(tensor)

    def _cuda(self, tensor: torch.Tensor, device: Any = None, non_blocking: bool = False, **_: Any) -> torch.Tensor:
        return tensor.to(torch.device("cuda", self._devices.index(device)), non_blocking=non_blocking)

    def _factory(self, own: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap ``torch.tensor`` and ``as_tensor``, which look for the device's own code before anything is dispatched."""

        def on_host(data: Any, *args: Any, device: Any, requires_grad: bool, **kwargs: Any) -> torch.Tensor:
            if isinstance(data, torch.Tensor):
                data = data.to(device)
            if requires_grad:
                kwargs["requires_grad"] = True
            made: torch.Tensor = own(data, *args, device=device, **kwargs)
            return made

        def factory(
            data: Any, *args: Any, device: Any = None, requires_grad: bool = False, **kwargs: Any
        ) -> torch.Tensor:
            is_tensor = isinstance(data, torch.Tensor)
            if is_tensor and device is None:
                device = data.device
            if isinstance(device, int):
                device = torch.device("cuda", device)
            if device is None or torch.device(device).type != "cuda":
                return on_host(data, *args, device=device, requires_grad=requires_grad, **kwargs)
            if is_tensor:
                moved = data.to(device, kwargs.get("dtype") or data.dtype, copy=own is not torch.as_tensor)
            else:
                moved = own(data, *args, device="cpu", **kwargs).to(device)
            return moved.detach().requires_grad_() if requires_grad else moved

        return factory

    def _grouped(self, own: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap the function that groups tensors by device and data type for optimizers and gradient clipping."""

        def grouped(lists: Any, with_indices: bool = False) -> Any:
            found = {}
            for (host, dtype), (parts, indices) in own(lists, with_indices).items():
                devices = [tensor.device for tensor in parts[0] if tensor is not None]
                device = devices[0] if devices else host
                found[device, dtype] = parts, indices
            return found

        return grouped

    # -- reads by the host -------------------------------------------------------------------------------------------

    def _reading(self, name: str, own: Callable[..., Any]) -> Callable[..., Any]:
        def read(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            place = self._devices.memory.place_of(tensor)
            if place is not None and place.device is None:
                self._devices.host_touches(tensor, place, f"Tensor.{name}", writes=False)
            elif place is not None:
                if name in ("numpy", "__array__"):
                    raise TypeError(
                        f"can't convert cuda:{place.device} device type tensor to numpy. Use Tensor.cpu() to copy the tensor to "
                        "host memory first."
                    )
                return own(tensor.detach().cpu(), *args, **kwargs)
            return own(tensor, *args, **kwargs)

        return read

    def _deepcopy(self, own: Callable[..., Any]) -> Callable[..., Any]:
        def deepcopy(tensor: torch.Tensor, memo: dict[int, Any]) -> torch.Tensor:
            if self._number(tensor) is None or id(tensor) in memo or type(tensor) not in _PLAIN or not tensor.is_leaf:
                return own(tensor, memo)
            data = tensor.detach().clone(memory_format=torch.preserve_format)
            if type(tensor) is torch.nn.Parameter:
                made: torch.Tensor = torch.nn.Parameter(data, tensor.requires_grad)
            else:
                made = data.requires_grad_(tensor.requires_grad)
            memo[id(tensor)] = made
            if tensor.grad is not None:
                made.grad = copy.deepcopy(tensor.grad, memo)
            made.__dict__ = copy.deepcopy(tensor.__dict__, memo)
            return made

        return deepcopy

    def _reduce(self, own: Callable[..., Any]) -> Callable[..., Any]:
        def reduce_ex(tensor: torch.Tensor, protocol: Any) -> Any:
            place = self._devices.memory.place_of(tensor)
            if place is None:
                return own(tensor, protocol)
            if place.device is None:
                self._devices.host_touches(tensor, place, "pickling", writes=False)
            elif place.block is not None:
                self._devices.wait_on_host("pickling", [self._devices.current(place.device)])
                with without_modes():  # pickling reads the host's view of the storage: copy the elements there
                    whole = torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())
                    whole.copy_(place.block.elements)
            return own(tensor, protocol)

        return reduce_ex

    # -- memory ----------------------------------------------------------------------------------------------------

    def _record_stream(self, tensor: torch.Tensor, stream: EmulatedStream) -> None:
        place = self._devices.memory.place_of(tensor)
        if place is None or place.device is None:
            raise CudaCallError("record_stream: the tensor is not on a device")
        # A tensor without elements has no memory.
        if place.block is not None:
            place.block.users.add(stream.lane.actor)

    def _is_pinned(self, tensor: torch.Tensor) -> bool:
        place = self._devices.memory.place_of(tensor)
        return place is not None and place.pinned

    def _pin_memory(self, tensor: torch.Tensor) -> torch.Tensor:
        if self._number(tensor) is not None:
            raise CudaCallError("cannot pin 'torch.cuda.FloatTensor' only dense CPU tensors can be pinned")
        if self._is_pinned(tensor):
            return tensor
        made = tensor.clone(memory_format=torch.contiguous_format)
        self._devices.memory.register(made, StoragePlace(None, pinned=True))
        return made

    def _resize(self, own: Callable[..., Any]) -> Callable[..., Any]:
        def resize_(storage: torch.UntypedStorage, size: int) -> torch.UntypedStorage:
            own(storage, size)
            place = self._devices.memory.place_of_storage(storage)
            if place is not None and place.device is not None:
                lane = self._devices.current(place.device)
                if place.block is not None and size:
                    self._devices.wait_on_host("resize_", [lane])
                with self._devices.lock:
                    lane.clock.join(self._devices.host)
                    self._devices.memory.resize(place, size, lane)
            return storage

        return resize_


def _overridable(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a tensor method that asks modes and subclasses first, as PyTorch's own methods do."""

    def method(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if has_torch_function_unary(tensor):
            return handle_torch_function(getattr(torch.Tensor, name), (tensor,), tensor, *args, **kwargs)
        return function(tensor, *args, **kwargs)

    method.__name__ = name
    return method


_READS = ("numpy", "tolist", "__array__")
_PLAIN = (torch.Tensor, torch.nn.Parameter)


def _moving(names: TensorNames) -> Any:
    """Return an autograd function that copies a tensor to another device, and its gradient back."""

    class Move(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, tensor: torch.Tensor, number: int | None, waits: bool) -> torch.Tensor:
            ctx.former = names.number(tensor)
            return names.move(tensor, number, waits)

        @staticmethod
        def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
            (gradient,) = gradients
            device = _CPU if ctx.former is None else torch.device("cuda", ctx.former)
            return gradient.to(device), None, None

    return Move
