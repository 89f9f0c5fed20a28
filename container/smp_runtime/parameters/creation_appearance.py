"""The appearance of tensors without values: they look to creating code as if they had been created at once.

Initialisers ask where a tensor is: some skip their work on the meta device, others create more tensors on the same device.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from smp_runtime.tensors.random_state import number_of

_TENSOR: Any = torch.Tensor  # its attributes are descriptors in PyTorch, but values to mypy

#: Functions by which code asks where a tensor lies.
_DEVICE = _TENSOR.device.__get__
_IS_META, _IS_CPU, _IS_CUDA = _TENSOR.is_meta.__get__, _TENSOR.is_cpu.__get__, _TENSOR.is_cuda.__get__
_GET_DEVICE = torch.Tensor.get_device
_PLACES = {_DEVICE, _IS_META, _IS_CPU, _IS_CUDA, _GET_DEVICE}
_MOVES = {torch.Tensor.to, torch.Tensor.cpu}
_SET_DATA = _TENSOR.data.__set__


class Appearances(TorchFunctionMode):
    """A mode in which a deferral's tensors report the device that they will be on.

    Args:
        device_of: returns that device; None for a tensor that does not belong to the deferral.
        skipped: gets each initialiser of ``torch.nn.init`` that does nothing on the meta device, with its arguments. Scripts
            may have imported it by its name long before, so it is found when it asks.
        stand_in: the tensor without values that stands for a real one in the record.

    Attributes:
        asks_for_meta: whether the script's call that runs names the meta device itself.
    """

    asks_for_meta = False

    def __init__(
        self,
        device_of: Callable[[torch.Tensor], torch.device | None],
        skipped: Callable[..., None],
        stand_in: Callable[[torch.Tensor], torch.Tensor],
    ) -> None:
        super().__init__()
        self._device_of, self._skipped, self._stand_in = device_of, skipped, stand_in

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        former, self.asks_for_meta = self.asks_for_meta, _names_meta(args if func in _MOVES else (), kwargs)
        try:
            return self._pass_on(func, args, kwargs)
        finally:
            self.asks_for_meta = former

    def _pass_on(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        if func in _PLACES:
            device = self._device_of(args[0])
            if device is None:
                return func(*args)
            return self._answer(func, device)
        if func in _MOVES:
            args, kwargs = self._without_move(func, args, kwargs)
            return torch.Tensor.to(*args, **kwargs)
        if func == _SET_DATA and self._device_of(args[0]) is not None:
            target, value = args
            if self._device_of(value) is None:
                args = (target, self._stand_in(value))
        return func(*args, **kwargs)

    def _answer(self, func: Any, device: torch.device) -> Any:
        if func == _DEVICE:
            return device
        if func == _IS_META:
            return self._is_skipped(sys._getframe(3))  # noqa: SLF001 - the code that asks
        if func == _GET_DEVICE:
            return -1 if device.type == "cpu" else number_of(device)
        return device.type == ("cpu" if func == _IS_CPU else "cuda")

    def _is_skipped(self, frame: Any) -> bool:
        """Return whether an initialiser asks; it then does nothing, since it is recorded to run later as a whole."""
        if frame.f_globals is not vars(nn.init):
            return False
        function = next((f for f in vars(nn.init).values() if getattr(f, "__code__", None) is frame.f_code), None)
        if function is None:
            return False
        names = frame.f_code.co_varnames[: frame.f_code.co_argcount]
        self._skipped(function, *(frame.f_locals[name] for name in names))
        return True

    def _without_move(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        """Return arguments of ``Tensor.to`` that keep a tensor unmoved if it will be on the target device."""
        tensor = args[0]
        device = self._device_of(tensor)
        if func == torch.Tensor.cpu:
            args, kwargs = (tensor, torch.device("cpu")), kwargs
        if device is None:
            return args, kwargs

        def stays(value: Any) -> Any:
            if isinstance(value, str | torch.device) and torch.device(value) == device:
                return torch.device("meta")
            return value

        if len(args) > 1 and isinstance(args[1], torch.Tensor) and self._device_of(args[1]) == device:
            args = (tensor, torch.device("meta"), args[1].dtype, *args[2:])
        return tuple(map(stays, args)), {name: stays(value) for name, value in kwargs.items()}


def _names_meta(args: Any, kwargs: Mapping[str, Any]) -> bool:
    """Return whether the arguments of a call name the meta device."""
    named = [value for value in (*args, kwargs.get("device")) if isinstance(value, str | torch.device)]
    return any(torch.device(value).type == "meta" for value in named)
