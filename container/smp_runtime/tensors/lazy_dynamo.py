"""PyTorch's compiler, which its optimizers load when they are first used: later, where nothing is compiled."""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable
from typing import Any

import torch

#: Attribute in which PyTorch keeps the form of a function that runs outside compiled code, from its first call on.
_OUTSIDE_COMPILER = "__dynamo_disable"
#: Modules of PyTorch's decorators that load its compiler when the decorated function is called.
_LOADING = {"inner": "torch._compile", "_use_grad": "torch.optim.optimizer"}


def load_compiler_later() -> Callable[[], None]:
    """Let optimizers run without PyTorch's compiler as long as it is not loaded.

    The first call of an optimizer loads the compiler only to mark where compiled code ends. This takes as long
    as loading the rest of PyTorch. If the compiler is not loaded, nothing is compiled, and the same functions
    are called directly.

    Returns:
        A function that restores PyTorch's own functions; call it once the compiler has been loaded.
    """
    marked: list[Any] = []
    # Set by whichever thread imports the compiler, and read by those that update.
    is_loaded = threading.Event()
    kinds = {kind for kind in vars(torch.optim).values() if isinstance(kind, type)}
    for holder in (kind for kind in kinds if issubclass(kind, torch.optim.Optimizer)):
        for name, call in list(vars(holder).items()):
            function, code = getattr(call, "__wrapped__", None), getattr(call, "__code__", None)
            if function is None or code is None:
                continue
            decorator = _LOADING.get(code.co_name)
            if decorator is None or code.co_filename != sys.modules[decorator].__file__:
                continue
            if code.co_name == "_use_grad":
                setattr(holder, name, _differentiable_if_asked(function, call, is_loaded))
            elif not hasattr(function, _OUTSIDE_COMPILER):
                setattr(function, _OUTSIDE_COMPILER, function)
                marked.append(function)

    def put_back() -> None:
        is_loaded.set()
        while marked:
            delattr(marked.pop(), _OUTSIDE_COMPILER)

    return put_back


def _differentiable_if_asked(
    step: Callable[..., Any], decorated: Callable[..., Any], is_loaded: threading.Event
) -> Callable[..., Any]:
    """Return an optimizer's ``step`` that uses PyTorch's decorated one only if the compiler is loaded."""

    @functools.wraps(step)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        __tracebackhide__ = True  # reports name the caller
        if is_loaded.is_set():
            return decorated(self, *args, **kwargs)
        with torch.set_grad_enabled(self.defaults["differentiable"]):
            return step(self, *args, **kwargs)

    return call
