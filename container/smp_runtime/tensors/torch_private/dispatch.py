"""What PyTorch keeps private of modes that see operations, of the operations, and of its compiler."""

# ruff: noqa: SLF001 - this folder is the place for private names

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode

from smp_runtime.tensors.torch_private.lookup import find_private

#: A context inside which no dispatch mode sees operations.
without_modes: Callable[[], Any] = find_private(
    "makes tensors past those who record their creation", "utils._python_dispatch._disable_current_modes"
)

#: The dispatch modes of the calling thread, outermost first.
dispatch_modes: Callable[[], list[Any]] = find_private(
    "finds the deferral that a model is created in", "utils._python_dispatch._get_current_dispatch_mode_stack"
)


def stay_in(mode: Any) -> None:
    """Enter a dispatch mode on the calling thread, for as long as it lives. Several threads may be in one."""
    from torch.utils._python_dispatch import _push_mode

    _push_mode(mode)


_function_modes: Callable[[], list[Any]] = find_private(
    "learns the default device of a thread", "overrides._get_current_function_mode_stack"
)

#: How many modes that take functions are on, on the calling thread.
count_function_modes: Callable[[], int] = find_private(
    "learns the default device of a thread", "_C._len_torch_function_stack"
)

_OPERATOR = type(torch.ops.aten.add.Tensor)


def default_device() -> str | None:
    """Return the kind of the calling thread's default device for new tensors; None if none was set."""
    if not count_function_modes():  # asked for at every call
        return None
    # Imported by the code that sets one first.
    kind = getattr(sys.modules.get("torch.utils._device"), "DeviceContext", ())
    return next((mode.device.type for mode in reversed(_function_modes()) if isinstance(mode, kind)), None)


def is_operator(function: Any) -> bool:
    """Return whether the function in a call of a dispatch mode is an operator, not a higher-order function."""
    return isinstance(function, _OPERATOR)


def schema_of(function: Any) -> Any:
    """Return an operator's schema, with ``name``, ``arguments`` and ``is_mutable``; None for a Python function."""
    return getattr(function, "_schema", None)


def packet_of(operation: Any) -> Any:
    """Return the packet of an operation, which has all its overloads."""
    return operation._overloadpacket


#: Operations that return a tensor in the memory of their argument, though their schemas do not declare it.
SHARING = frozenset({torch.ops.aten._unsafe_view.default})

#: The operation behind ``tensor.item()``.
ITEM = torch.ops.aten._local_scalar_dense.default


def compile_errors() -> tuple[type[BaseException], ...]:
    """Return the errors that a compiled function raises if it cannot be compiled; empty without the compiler."""
    kinds = sys.modules.get("torch._dynamo.exc")
    return () if kinds is None else (kinds.TorchDynamoException,)


def never_compiled(function: Any, *, alone: bool = False) -> Any:
    """Let ``torch.compile`` run a function as it is, and unless ``alone`` all that it calls; this has no cost per call."""
    frames: Any = getattr(getattr(torch._C, "_dynamo", None), "eval_frame", None)
    if hasattr(frames, "set_code_exec_strategy"):
        actions = (frames._FrameAction.SKIP, frames._FrameAction.DEFAULT if alone else frames._FrameAction.SKIP)
        frames.set_code_exec_strategy(function.__code__, frames._FrameExecStrategy(*actions))
    function._torchdynamo_disable = not alone
    return function
