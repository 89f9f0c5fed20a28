"""Stand-ins for tensors on another pipeline stage: they have shapes and types, and raise an error if elements are needed.

PyTorch's meta tensors alone would not do: ``real.add_(meta)`` silently does nothing.
"""

from __future__ import annotations

import contextlib
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NoReturn

import torch
from torch import nn

from smp_runtime.errors import SMPUserError
from smp_runtime.microbatch_state.entries import ModuleSlot, Taken
from smp_runtime.tensors.lazy_tensor import NEEDS_NO_ELEMENTS, OF_ITS_PLACE, changes_in_place
from smp_runtime.tensors.nested import argument_tensors, leaves_of
from smp_runtime.tensors.torch_private import DisableTorchFunctionSubclass as _Plainly
from smp_runtime.tensors.torch_private import make_subclass, rebuild_parameter

#: Devices that absent tensors report, the innermost last. If it is empty, they report the meta device.
_appearing_on: list[torch.device] = []


@contextlib.contextmanager
def appearing_on(device: torch.device) -> Iterator[None]:
    """Let absent tensors report ``device`` as theirs inside the block.

    It is for functions that move their inputs to the device of the model's parameters.
    """
    _appearing_on.append(device)
    try:
        yield
    finally:
        _appearing_on.pop()


class RemoteStub(torch.Tensor):
    """A tensor without elements that stands for a tensor on another stage, or for a result computed from such.

    Operations on absent tensors only do nothing and return absent tensors. So a loop over all parameters runs on every rank,
    and takes effect on the rank that has them. An operation that needs elements, or mixes absent tensors with tensors of
    this rank, raises an error.

    Attributes:
        absent_name: the object that it stands for, such as ``parameter encoder.weight``.
        absent_stage: the stage that has it.
    """

    absent_name: str
    absent_stage: int
    is_meta = True  # even those that C++ kept off the meta device have no elements

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        """Return the device set by :func:`appearing_on`, or else the meta device."""
        if _appearing_on:
            return _appearing_on[-1]
        with _Plainly():
            return torch.Tensor.device.__get__(self)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        # The stage of the parameter has the gradient.
        sets_gradient = func == _SETS_GRADIENT and args[1] is not None
        if sets_gradient:
            return None
        if func in _ASKS_NO_ELEMENTS:
            return _run_plainly(func, args, kwargs)
        tensors = argument_tensors((args, kwargs))
        absent = [tensor for tensor in tensors if isinstance(tensor, RemoteStub)]
        # Then the stand-in is in an argument that is not looked into.
        if not absent:
            return _run_plainly(func, args, kwargs)
        name = getattr(func, "__name__", str(func))
        present = [tensor for tensor in tensors if not isinstance(tensor, RemoteStub) and not tensor.is_meta]
        if present:
            return _run_on_both(func, name, args, kwargs, tensors[0], absent, present)
        return _run_without_elements(func, name, args, kwargs, tensors[0], absent[0])

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        with _Plainly():
            kind = str(self.dtype).removeprefix("torch.")
            return f"<{self.absent_name} on pipeline stage {self.absent_stage}: {kind}{list(self.shape)}>"

    def __format__(self, format_spec: str) -> str:
        if format_spec:
            _refuse_elements(self, "format")
        return repr(self)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        if id(self) not in memo:
            memo[id(self)] = _stand_in(type(self), self, self.absent_name, self.absent_stage)
        return memo[id(self)]

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Reduce to a plain tensor or parameter on the meta device, which can be read without this package."""
        with _Plainly():
            plain = torch.empty_like(self, device="meta", requires_grad=False).as_subclass(torch.Tensor)
            if isinstance(self, RemoteStubParameter):
                return rebuild_parameter, (plain, self.requires_grad, OrderedDict())
            return plain.__reduce_ex__(protocol)


class RemoteStubParameter(RemoteStub, nn.Parameter):
    """A parameter of a module on another stage."""


class RemoteStubAttribute:
    """Stands for an attribute that a module on another stage sets while it runs; any use of it raises."""

    def __init__(self, path: str, name: str, stage: int) -> None:
        vars(self).update(_path=path, _name=name, _stage=stage)

    def __repr__(self) -> str:
        return f"<attribute {self._name!r} of module {self._path!r} on pipeline stage {self._stage}>"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # copying, pickling and printing look for these
            raise AttributeError(name)
        _refuse_use(self)

    def __setattr__(self, name: str, value: Any) -> None:
        _refuse_use(self)

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for each in leaves_of((args, kwargs)):
            if isinstance(each, RemoteStubAttribute):
                _refuse_use(each)
        raise SMPUserError(
            "a torch function got an attribute of a module on another pipeline stage, which is set there alone; "
            "return the value from the module's forward instead",
            code="SMP303",
        )

    def __format__(self, format_spec: str) -> str:
        if format_spec:
            _refuse_use(self)
        return repr(self)

    __hash__ = object.__hash__


def _refuse_use(attribute: RemoteStubAttribute, *args: Any, **kwargs: Any) -> NoReturn:
    name, path, stage = (vars(attribute)[key] for key in ("_name", "_path", "_stage"))
    raise SMPUserError(
        f"attribute {name!r} of module {path!r} is used here, but the module sets it while it runs, and it runs on pipeline stage "
        f"{stage}, another one; return the value from its forward instead, or put both modules on one stage with smp.set_partition",
        code="SMP303",
    )


for _operator in (
    "add sub mul matmul truediv floordiv mod divmod pow lshift rshift and xor or".split()  # a, b = both sides, in place
):
    for _side in ("__{}__", "__r{}__", "__i{}__"):
        setattr(RemoteStubAttribute, _side.format(_operator), _refuse_use)
for _operator in (
    "lt le eq ne gt ge neg pos abs invert bool float int index complex len iter next contains getitem setitem delitem "
    "array round enter exit"
).split():
    setattr(RemoteStubAttribute, f"__{_operator}__", _refuse_use)


class RemoteStubAttributes:
    """The stand-ins for attributes, by path and name, that modules of other stages set while they run."""

    def __init__(
        self,
        modules: dict[str, nn.Module],
        attributes: Iterable[tuple[str, str]],
        stage_of: Callable[[str], int],
        is_local: Callable[[str], bool],
    ) -> None:
        self._former: list[tuple[ModuleSlot, Taken]] = []
        for path, name in attributes:
            if path in modules and not is_local(path):
                slot = ModuleSlot(vars(modules[path]), name)
                self._former.append((slot, slot.take()))
                slot.put(Taken(RemoteStubAttribute(path, name, stage_of(path))))

    def remove(self) -> None:
        """Give the modules their former attributes back."""
        for slot, taken in self._former:
            if isinstance(slot.take().value, RemoteStubAttribute):
                slot.put(taken)
        self._former.clear()


def absent_parameter(
    parameter: nn.Parameter, name: str, stage: int, dtype: torch.dtype | None = None
) -> RemoteStubParameter:
    """Return a stand-in for a parameter, with its shape and ``requires_grad``.

    ``dtype`` is the parameter's type on its own stage, if it differs.
    """
    made: RemoteStubParameter = _stand_in(RemoteStubParameter, parameter, f"parameter {name}", stage, dtype)
    return made


def make_absent_in_place(parameter: nn.Parameter, name: str, stage: int, dtype: torch.dtype) -> None:
    """Make a parameter absent in place, since C++ holds it too (TorchScript) and it cannot be swapped."""
    parameter.data = torch.zeros((), dtype=dtype, device=parameter.device).expand(parameter.shape)
    made: Any = parameter
    made.__class__ = RemoteStubParameter
    made.absent_name, made.absent_stage = f"parameter {name}", stage


def absent_attributes_of(module: nn.Module, path: str, stage: int) -> None:
    """Make tensors of a module absent that depend on its parameters' graph, as with ``weight_norm``."""
    for name, value in list(vars(module).items()):
        if isinstance(value, torch.Tensor) and value.grad_fn is not None:
            where = f"attribute {path}.{name}" if path else f"attribute {name}"
            vars(module)[name] = _stand_in(RemoteStub, value.detach(), where, stage)


def _stand_in(kind: type, like: torch.Tensor, name: str, stage: int, dtype: torch.dtype | None = None) -> Any:
    with _Plainly():
        # A plain tensor comes first, because a subclass's own functions would intercept the calls.
        empty = torch.empty_like(like, dtype=dtype, device="meta", requires_grad=False).as_subclass(torch.Tensor)
        made: Any = make_subclass(kind, empty, like.requires_grad)
    made.absent_name, made.absent_stage = name, stage
    return made


def _absent(out: Any, origin: RemoteStub) -> Any:
    if isinstance(out, torch.Tensor):
        if isinstance(out, RemoteStub) or not out.is_meta:
            return out
        made = out.as_subclass(RemoteStub)
        made.absent_name, made.absent_stage = origin.absent_name, origin.absent_stage
        return made
    if isinstance(out, tuple | list):
        return getattr(type(out), "_make", type(out))([_absent(each, origin) for each in out])
    return out


def _run_on_both(
    func: Any,
    name: str,
    args: Any,
    kwargs: Any,
    first: torch.Tensor,
    absent: list[RemoteStub],
    present: list[torch.Tensor],
) -> Any:
    """Run an operation on absent tensors together with tensors of this rank, if that has a meaning."""
    if name.startswith("_foreach_") and len(args[0]) > 1:
        return _one_by_one(func, args, kwargs)
    if _is_left_to_its_stage(name, first, present):
        return first
    if not _are_scalars(present, absent):
        _refuse_mixing(absent[0], name)
    return _run_without_elements(func, name, args, kwargs, first, absent[0])


def _is_left_to_its_stage(name: str, first: torch.Tensor, present: list[torch.Tensor]) -> bool:
    """Return whether an operation only changes an absent tensor, so that its stage does it with elements of its own."""
    if not changes_in_place(name) or not isinstance(first, RemoteStub):
        return False
    is_own = any(isinstance(tensor, nn.Parameter) or tensor.requires_grad for tensor in present)
    return not is_own


def _run_without_elements(func: Any, name: str, args: Any, kwargs: Any, first: torch.Tensor, absent: RemoteStub) -> Any:
    """Run an operation on shapes only.

    Args:
        first: the operation's first tensor, which it returns if it changes tensors in place.
        absent: its first absent tensor, named in errors.
    """
    if name in _ASKS_ELEMENTS:
        _refuse_elements(absent, name)
    try:
        with _Plainly():
            out = func(*_on_meta(args), **_on_meta(kwargs))
        if changes_in_place(name) and not name.startswith("_foreach_"):
            return first
        return _absent(out, absent)
    except (RuntimeError, TypeError) as error:
        if "meta" not in str(error).lower():
            raise
        _refuse_elements(absent, name)


def _run_plainly(func: Any, args: Any, kwargs: Any) -> Any:
    with _Plainly():
        return func(*args, **kwargs)


def _on_meta(value: Any) -> Any:
    """Move stand-ins that are not on the meta device (TorchScript's) there for an operation."""
    if isinstance(value, RemoteStub) and value.device.type != "meta":
        return torch.empty_like(value, device="meta")
    if type(value) in (tuple, list):
        return type(value)([_on_meta(each) for each in value])
    if type(value) is dict:
        return {key: _on_meta(each) for key, each in value.items()}
    return value


def _are_scalars(present: list[torch.Tensor], absent: list[RemoteStub]) -> bool:
    """Return whether an absent tensor of several elements is only scaled, by a number that the script has made."""
    if all(tensor.dim() == 0 for tensor in absent):
        return False
    return all(_is_number(tensor) for tensor in present)


def _is_number(tensor: torch.Tensor) -> bool:
    if isinstance(tensor, nn.Parameter) or tensor.requires_grad:
        return False
    return tensor.dim() == 0


def _one_by_one(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run an operation on lists of tensors index by index; at each index all are absent, or all are present."""

    def part(value: Any, index: int) -> Any:
        is_list = isinstance(value, tuple | list) and len(value) == count
        return [value[index]] if is_list else value

    count = len(args[0])
    done = []
    for index in range(count):
        arguments = [part(each, index) for each in args]
        named = {key: part(each, index) for key, each in kwargs.items()}
        done.append(func(*arguments, **named))
    if func.__name__.endswith("_"):
        return args[0]
    return [each[0] for each in done]


def _refuse_mixing(tensor: RemoteStub, name: str) -> NoReturn:
    what, stage = tensor.absent_name, tensor.absent_stage
    raise SMPUserError(
        f"{name} got {what} together with a tensor of this rank, but it lies on pipeline stage {stage}, another one, and this "
        "rank has only its shape; put what is used together on one stage with smp.set_partition, call the module that has it "
        f"instead of using it directly, or, between steps, run this only where it is (if smp.pp_rank() == {stage}, or over "
        "model.local_parameters())",
        code="SMP303",
    )


def _refuse_elements(tensor: RemoteStub, name: str) -> NoReturn:
    what, stage = tensor.absent_name, tensor.absent_stage
    raise SMPUserError(
        f"{name} needs the elements of {what}, but it lies on pipeline stage {stage}, another one, and this rank has only its "
        f"shape; run this on the rank that has it (if smp.pp_rank() == {stage}), go over model.local_parameters(), or take the "
        "value from model.state_dict(), which gathers all stages' on every rank",
        code="SMP303",
    )


_ASKS_ELEMENTS = {"item", "tolist", "numpy", "__array__", "__bool__", "__float__", "__int__", "__index__", "equal"}
_SETS_GRADIENT = torch.Tensor.grad.__set__  # type: ignore[union-attr]
#: Answered from shape and type, as often as they are asked.
_ASKS_NO_ELEMENTS = {
    *NEEDS_NO_ELEMENTS,
    *OF_ITS_PLACE,
    *(torch.Tensor.stride, torch.Tensor.storage_offset, torch.Tensor.is_contiguous, torch.Tensor.untyped_storage),
}
