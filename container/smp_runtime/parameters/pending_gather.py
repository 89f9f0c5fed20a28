"""Parameters with an all-gather of new values in progress; only a reader of the values waits for it.

After an update of sharded state each rank has new values of its own part and gets the others' from other ranks. If a
rank waited for all of them there, its processor would be idle until the last has come. But the next forward pass
needs the first layer's values first.

Until its values are there a parameter is of the class :class:`PendingParameter`; every function of PyTorch that needs
its elements waits for them. Modules also wait before they are called, since a third-party kernel may read a parameter
without PyTorch's functions.
"""

from __future__ import annotations

import copy
import threading
import weakref
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, Protocol

import torch
from torch import nn

from smp_runtime.tensors.lazy_tensor import NEEDS_NO_ELEMENTS, OF_ITS_PLACE
from smp_runtime.tensors.torch_private import DisableTorchFunctionSubclass, tree_leaves

#: Attribute of such a parameter that holds its pending gather.
_GATHER = "_smp_gather"

#: Functions that need not wait for the values.
_NEEDS_NO_ELEMENTS = NEEDS_NO_ELEMENTS | OF_ITS_PLACE


class PendingWork(Protocol):
    """A collective under way."""

    def wait(self) -> object:
        """Return when the tensors can be used."""


class PendingParameter(nn.Parameter):
    """A parameter with a pending gather; it becomes a plain one at the first read of its values."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _NEEDS_NO_ELEMENTS:
            with DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        # The gather may still be writing into the parameter.
        for leaf in tree_leaves((args, kwargs)):
            if isinstance(leaf, PendingParameter):
                wait_for(leaf)
        return func(*args, **kwargs)

    # What Python itself does with an object, in which its class takes part.

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        wait_for(self)
        return copy.deepcopy(self, memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        wait_for(self)
        return self.__reduce_ex__(protocol)


class _ParameterGather:
    """Parameters that come together."""

    def __init__(
        self,
        work: PendingWork,
        parameters: Iterable[nn.Parameter],
        kept: torch.Tensor,
        end: Callable[[_ParameterGather], None],
    ) -> None:
        self._work: PendingWork | None = work
        self._parameters = [weakref.ref(parameter) for parameter in parameters]
        self._kept: torch.Tensor | None = kept  # into which others write, whether or not anybody has the model any more
        self._end = end
        self._lock = threading.Lock()
        self._stream = _stream_of(kept.device)
        for parameter in parameters:
            vars(parameter)[_GATHER] = self
            parameter.__class__ = PendingParameter

    def wait(self) -> None:
        """Block until the values are there; any thread may call it."""
        # Several threads may read at once: one of them finishes the gather, and the others wait for that.
        with self._lock:
            if self._work is None:
                return
            self._work.wait()
            if self._stream is not None and self._stream != torch.cuda.current_stream():
                with torch.cuda.stream(self._stream):  # later work on that stream must wait too
                    self._work.wait()
            for refer in self._parameters:
                parameter = refer()
                if parameter is not None:
                    _make_plain(parameter)
            self._work = self._kept = None
        self._end(self)


class PendingGathers:
    """The pending gathers of this rank, one instance for each job; a rank must not leave before all are done."""

    def __init__(self) -> None:
        self._under_way: list[_ParameterGather] = []

    def expect(self, work: PendingWork, parameters: Sequence[nn.Parameter], flat: torch.Tensor) -> None:
        """Register a gather of new values into ``flat``; the parameters are views of it.

        Parameters of classes of their own would lose these for a while. For such parameters, wait at once.
        """
        if any(type(parameter) is not nn.Parameter for parameter in parameters):
            work.wait()
        else:
            self._under_way.append(_ParameterGather(work, parameters, flat, self._under_way.remove))

    def settle(self) -> None:
        """Wait for all that is under way."""
        for gather in list(self._under_way):
            gather.wait()


def wait_for(parameter: nn.Parameter) -> None:
    """Block until the parameter's gather is done, and make it a plain parameter."""
    gather = vars(parameter).get(_GATHER)
    if gather is not None:
        gather.wait()
    _make_plain(parameter)  # also a copy, for which nothing is under way


def _make_plain(parameter: nn.Parameter) -> None:
    if type(parameter) is PendingParameter:
        object.__setattr__(parameter, "__class__", nn.Parameter)
    vars(parameter).pop(_GATHER, None)


def _stream_of(device: torch.device) -> Any:
    return torch.cuda.current_stream(device) if device.type == "cuda" else None


def wait_before_calls(
    module: nn.Module, parameters: Collection[nn.Parameter], is_one: Callable[[nn.Module], bool]
) -> None:
    """Make modules wait for their own parameters, among the given ones, before they are called.

    Args:
        is_one: whether a module's call must not be interrupted by hooks inside, as that of a compiled one.
    """
    whole = is_one(module)
    held = [parameter for parameter in module.parameters(recurse=whole) if parameter in parameters]
    if held:
        module.register_forward_pre_hook(_WaitingHook(held))
    for child in () if whole else module.children():
        wait_before_calls(child, parameters, is_one)


class _WaitingHook:
    """A hook that waits for parameters; what a script copies or saves of the module gets one that waits for none."""

    def __init__(self, parameters: Sequence[nn.Parameter] = ()) -> None:
        self._parameters = parameters

    def __call__(self, *_: Any) -> None:
        for parameter in self._parameters:
            if type(parameter) is PendingParameter:
                wait_for(parameter)

    def __reduce__(self) -> tuple[type[_WaitingHook], tuple[()]]:
        return _WaitingHook, ()
