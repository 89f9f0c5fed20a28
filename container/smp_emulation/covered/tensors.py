"""Functions and methods that take a device: a CUDA device is the CPU for them, and pinned memory is plain memory."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import handle_torch_function, has_torch_function_unary

from smp_emulation.calls import CoveredCall, answer_with, asked_by_pytorch_or_us, do_nothing
from smp_emulation.devices import CPU, index_of, initialize, real_device, use_device

#: Functions of ``torch`` with an argument ``device``.
FACTORIES = """
    torch.arange torch.as_tensor torch.asarray torch.bartlett_window torch.blackman_window torch.empty torch.empty_like
    torch.empty_permuted torch.empty_quantized torch.empty_strided torch.eye torch.frombuffer torch.full torch.full_like
    torch.hamming_window torch.hann_window torch.kaiser_window torch.linspace torch.logspace torch.ones torch.ones_like
    torch.rand torch.rand_like torch.randint torch.randint_like torch.randn torch.randn_like torch.randperm torch.range
    torch.scalar_tensor torch.sparse_bsc_tensor torch.sparse_bsr_tensor torch.sparse_compressed_tensor
    torch.sparse_coo_tensor torch.sparse_csc_tensor torch.sparse_csr_tensor torch.tensor torch.tril_indices
    torch.triu_indices torch.zeros torch.zeros_like torch.normal torch.fft.fftfreq torch.fft.rfftfreq
    torch.nested.nested_tensor torch.nested.as_nested_tensor
    torch.Tensor.new_empty torch.Tensor.new_empty_strided torch.Tensor.new_full torch.Tensor.new_ones torch.Tensor.new_tensor
    torch.Tensor.new_zeros
""".split()

#: Begins the names of CUDA's tensor types, such as ``torch.cuda.FloatTensor``.
_TYPE_PREFIX = "torch.cuda."


def _with_device(original: Any) -> Any:
    """Wrap a function that takes ``device`` and perhaps ``pin_memory`` by name."""

    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        if kwargs:
            device = kwargs.get("device")
            if device is not None:
                kwargs["device"] = real_device(device)
            # Only a machine with a GPU can pin memory.
            if kwargs.get("pin_memory"):
                kwargs["pin_memory"] = False
        if args and _has_answers(args[0]):
            return handle_torch_function(call, args[:1], *args, **kwargs)
        return original(*args, **kwargs)

    return call


def _has_answers(value: Any) -> bool:
    """Return whether a tensor's class answers functions itself: it knows them as scripts see them, covered.

    PyTorch would ask it about the function below the cover.
    """
    kind = type(value)
    if kind is torch.Tensor or not isinstance(value, torch.Tensor):
        return False
    return kind.__torch_function__ is not torch.nn.Parameter.__torch_function__ and has_torch_function_unary(value)


def _tensor_to(original: Any) -> Any:
    @functools.wraps(original)
    def to(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if args:
            wanted = args[0]
            # By exact types, as this runs in every call: a data type or another tensor names no device here.
            names_device = type(wanted) in (torch.device, str, int)
            if names_device:
                args = (real_device(wanted), *args[1:])
                # A fourth argument is ``copy`` itself.
                if len(args) < 4 and _is_copied_back(self, wanted):
                    kwargs["copy"] = True
        elif (wanted := kwargs.get("device")) is not None:
            kwargs["device"] = real_device(wanted)
            if _is_copied_back(self, wanted):
                kwargs["copy"] = True
        return original(self, *args, **kwargs)

    return to


def _is_copied_back(tensor: torch.Tensor, wanted: Any) -> bool:
    """Return whether a script asks for a tensor in main memory that a GPU would return as a copy.

    Only the string "cpu" counts. A ``torch.device`` that is the CPU usually comes from another tensor, and means the device
    where all tensors are.
    """
    is_cpu_by_name = type(wanted) is str and wanted == "cpu"
    if not is_cpu_by_name or tensor.device != CPU:
        return False
    return not asked_by_pytorch_or_us(depth=3)


def _tensor_cuda(original: Any) -> Any:
    @functools.wraps(original)
    def cuda(
        self: torch.Tensor, device: Any = None, non_blocking: bool = False, memory_format: Any = torch.preserve_format
    ) -> torch.Tensor:
        initialize()
        use_device(index_of(device), "a tensor")
        return self.to(CPU, memory_format=memory_format) if self.device.type != "cpu" else self

    return cuda


def _tensor_cpu(original: Any) -> Any:
    @functools.wraps(original)
    def cpu(self: torch.Tensor, memory_format: Any = torch.preserve_format) -> torch.Tensor:
        if self.device.type == "cpu" and not asked_by_pytorch_or_us():
            return self.clone(memory_format=memory_format)
        return original(self, memory_format=memory_format)

    return cpu


def type_here(kind: Any) -> Any:
    """Return the CPU type for ``torch.cuda.FloatTensor`` or its name, and other types unchanged."""
    if isinstance(kind, str):
        return "torch." + kind.removeprefix(_TYPE_PREFIX) if kind.startswith(_TYPE_PREFIX) else kind
    return getattr(kind, "on_cpu", kind)


def _tensor_type(original: Any) -> Any:
    @functools.wraps(original)
    def type_(self: torch.Tensor, dtype: Any = None, non_blocking: bool = False, **kwargs: Any) -> Any:
        if dtype is not None:
            return original(self, type_here(dtype), non_blocking, **kwargs)
        name = original(self)
        is_of_host = name.startswith("torch.") and not name.startswith(_TYPE_PREFIX)
        # PyTorch's own code looks up its types by the true name.
        if is_of_host and not asked_by_pytorch_or_us():
            return _TYPE_PREFIX + name.removeprefix("torch.")
        return name

    return type_


def _is_cuda(original: Any) -> Any:
    def is_cuda(self: torch.Tensor) -> bool:
        if self.device.type == "cpu" and not asked_by_pytorch_or_us():
            return True
        is_there: bool = original.__get__(self)
        return is_there

    return property(is_cuda, doc=inspect.getdoc(original))


def _get_device(original: Any) -> Any:
    @functools.wraps(original)
    def get_device(self: torch.Tensor) -> int:
        if self.device.type == "cpu" and not asked_by_pytorch_or_us():
            return index_of(None)
        return int(original(self))

    return get_device


def _storage_cuda(original: Any) -> Any:
    @functools.wraps(original)
    def cuda(self: Any, device: Any = None, non_blocking: bool = False) -> Any:
        index_of(device)
        return self

    return cuda


def _storage_to(original: Any) -> Any:
    @functools.wraps(original)
    def to(self: Any, *, device: Any, non_blocking: bool = False) -> Any:
        return original(self, device=real_device(device), non_blocking=non_blocking)

    return to


def _taking_device(position: int) -> Callable[[Any], Any]:
    """Return a decorator for a function or constructor with a device as argument ``position`` or ``device``."""

    def wrap(original: Any) -> Any:
        @functools.wraps(original)
        def call(*args: Any, **kwargs: Any) -> Any:
            if len(args) > position:
                args = (*args[:position], real_device(args[position]), *args[position + 1 :])
            elif "device" in kwargs:
                kwargs["device"] = real_device(kwargs["device"])
            return original(*args, **kwargs)

        return call

    return wrap


def _default_tensor_type(original: Any) -> Any:
    @functools.wraps(original)
    def set_default_tensor_type(t: Any, /) -> None:
        original(type_here(t))

    return set_default_tensor_type


def _make_type(name: str, among: Any = torch) -> type:
    """Return ``torch.cuda.<name>``, which creates CPU tensors, and recognizes its instances by their element type."""
    on_cpu = getattr(among, name)

    class _Type(type):
        def __call__(cls, *args: Any, **kwargs: Any) -> Any:
            if "device" in kwargs:
                kwargs["device"] = real_device(kwargs["device"])
            return on_cpu(*args, **kwargs)

        def __instancecheck__(cls, value: object) -> bool:
            return isinstance(value, on_cpu)

    fields = {
        "on_cpu": on_cpu,
        "dtype": on_cpu.dtype,
        "is_cuda": True,
        "is_sparse": on_cpu.is_sparse,
        "layout": on_cpu.layout,
    }
    return _Type(name, (), {**fields, "__module__": "torch.cuda"})


def _type_of(name: str, among: Any = torch) -> Callable[[Any], Any]:
    return lambda original: _make_type(name, among)


TYPES = [f"{name}Tensor" for name in "BFloat16 Bool Byte Char Double Float Half Int Long Short".split()]

CALLS = (
    *(CoveredCall(name, "the CPU for a CUDA device, plain memory for pinned", _with_device) for name in FACTORIES),
    CoveredCall("torch.Tensor.to", "the CPU for a CUDA device; a copy for 'cpu', as from a GPU", _tensor_to),
    CoveredCall("torch.Tensor.cuda", "the tensor itself", _tensor_cuda),
    CoveredCall("torch.Tensor.cpu", "a copy, as from a GPU", _tensor_cpu),
    CoveredCall("torch.Tensor.type", "names and takes types of torch.cuda", _tensor_type),
    CoveredCall("torch.Tensor.is_cuda", "True for scripts", _is_cuda),
    CoveredCall("torch.Tensor.get_device", "the current device, for scripts", _get_device),
    answer_with("torch.Tensor.pin_memory", "the tensor itself", lambda self, device=None: self),
    answer_with("torch.Tensor.is_pinned", "False", lambda self, device=None: False),
    answer_with("torch.Tensor.record_stream", "nothing to remember", do_nothing),
    *(
        CoveredCall(f"torch.{kind}.cuda", "the storage itself", _storage_cuda)
        for kind in ("UntypedStorage", "TypedStorage")
    ),
    *(
        CoveredCall(f"torch.{kind}.to", "the CPU for a CUDA device", _storage_to)
        for kind in ("UntypedStorage", "TypedStorage")
    ),
    CoveredCall("torch.set_default_tensor_type", "the CPU's type", _default_tensor_type),
    CoveredCall("torch.set_default_device", "the CPU for a CUDA device", _taking_device(0)),
    CoveredCall("torch.utils._device.DeviceContext.__init__", "the CPU for a CUDA device", _taking_device(1)),
    CoveredCall("torch.nn.Module.to", "the CPU for a CUDA device", _taking_device(1)),
    CoveredCall("torch.nn.Module.to_empty", "the CPU for a CUDA device", _taking_device(1)),
    *(CoveredCall(f"torch.cuda.{name}", f"makes torch.{name}", _type_of(name)) for name in TYPES),
    *(
        CoveredCall(f"torch.cuda.sparse.{name}", f"makes torch.sparse.{name}", _type_of(name, torch.sparse))
        for name in TYPES
        if hasattr(torch.sparse, name)
    ),
    *(
        answer_with(f"torch.cuda.{name}", f"makes torch.{name}", getattr(torch, name))
        for name in [
            *(name.replace("Tensor", "Storage") for name in TYPES),
            "ComplexDoubleStorage",
            "ComplexFloatStorage",
        ]
    ),
)
