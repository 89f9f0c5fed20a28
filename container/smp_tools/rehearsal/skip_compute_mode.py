"""Operations that are not performed: large results get memory that is never written, small ones their real values.

An operation of PyTorch on large tensors costs memory and time because its elements are written. Here, such an operation only
allocates its result. The system allocates pages when they are written to, so a tensor of 10 GB that is never written costs
nothing. Small tensors (losses, flags, indices, a batch of tokens) are computed as usual. So a script's ``if`` and the runtime's
own agreements see values. Shapes, types and strides of results come from PyTorch's own kernels for the meta device.

All tensors stay ordinary CPU tensors: autograd, hooks, views, pickling and storages work as in a job.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import math
import mmap
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch

from smp_records.script_lines import script_line
from smp_runtime.context.sequence import ShardedSequence
from smp_runtime.errors import SMPUserError
from smp_runtime.tensors.torch_private import (
    ITEM,
    SHARING,
    TorchDispatchMode,
    packet_of,
    schema_of,
    tree_map,
    without_modes,
)

#: An operation is performed if its tensors, arguments and results together, have at most this many bytes.
PERFORMED_BYTES = 256 * 1024

#: Results up to so many bytes get values even if nothing is computed: larger memory is fresh from the system, and so all zeros.
_FILLED_BYTES = 256 * 1024

#: Options of the C library's ``malloc``. They keep it from handing out freed memory with old values in it.
_M_MMAP_THRESHOLD, _M_MMAP_MAX = -3, -4

#: Linux's flag for memory that is not counted before it is written; Python names it since 3.11.
_MAP_NORESERVE = 0x4000

_META = torch.device("meta")


def use_fresh_memory() -> None:
    """Make every large allocation of this process come from the system, as zeros that take no memory until written.

    If the C library has no such option, large memory may be reused with its old contents.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return
    mallopt(_M_MMAP_THRESHOLD, _FILLED_BYTES // 2)
    mallopt(_M_MMAP_MAX, 2**30)


@dataclass(frozen=True, slots=True)
class _Shape:
    """The shape, strides and data type of a result."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return math.prod(self.size) * self.dtype.itemsize


class _Plan:
    """The way in which an operation uses its arguments, read from its schema once.

    Attributes:
        is_free: it touches no elements: a view, or a change of a tensor's shape.
        written: for each return value, the position or name of the argument that it is; None for a new tensor.
        mutates: whether it writes into an argument.
        is_dynamic: the shape of its result depends on values.
    """

    def __init__(self, function: Any) -> None:
        schema = schema_of(function)
        tags = function.tags
        returns = [value.alias_info for value in schema.returns]
        is_view = _are_views(returns)
        changes_shape_only = torch.Tag.inplace_view in tags or function.__name__.startswith(("set_.", "resize_"))
        self.is_free = is_view or changes_shape_only or function in SHARING or function in _OF_SHAPES
        self.mutates = schema.is_mutable
        self.is_dynamic = torch.Tag.dynamic_output_shape in tags or function in _DYNAMIC
        places = _written_places(schema)
        self.written: list[int | str | None] = []
        for alias in returns:
            names = alias.before_set if _is_written(alias) else ()
            name = next(iter(names), None)
            self.written.append(None if name is None else places.get(name))
        self.names = [argument.name for argument in schema.arguments]

    def argument(self, place: int | str, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Return the argument at a position, whether it was passed by position or by name."""
        if isinstance(place, int):
            return args[place] if place < len(args) else kwargs.get(self.names[place])
        return kwargs.get(place)


#: Operations without the tag that still have a result that depends on values.
_DYNAMIC = {torch.ops.aten.equal.default, ITEM}


#: Operations that read shapes and types of tensors only. The meta device's kernel has no fused attention, and answers that.
_OF_SHAPES = {torch.ops.aten._fused_sdp_choice.default}  # noqa: SLF001 - listed in torch_private


class SkippedOperation(NamedTuple):
    """An operation that has been performed, or has only allocated its result."""

    function: Any
    args: Sequence[Any]
    kwargs: dict[str, Any]
    given: list[torch.Tensor]  # tensors among the arguments
    result: Any
    made: list[torch.Tensor]  # tensors of the result


class Watcher(Protocol):
    """An observer that is called after every operation that touches elements; views do not count."""

    def performed(self, operation: SkippedOperation) -> None:
        """Handle an operation that is done."""


class SkipComputeMode(TorchDispatchMode):
    """Performs small operations on the calling thread, and only allocates the results of large ones.

    Args:
        watchers: hear of every operation.
        collective: what does operations of ``torch.distributed``; None: they are done as ever.
        performed_bytes: largest operations that are performed; None performs all, as a job does.
    """

    def __init__(
        self,
        watchers: Sequence[Watcher] = (),
        collective: Callable[[Any, Sequence[Any], dict[str, Any]], Any] | None = None,
        performed_bytes: int | None = PERFORMED_BYTES,
    ) -> None:
        super().__init__()
        self._watchers = list(watchers)
        self._collective = collective
        self._limit = performed_bytes
        self._plans: dict[Any, _Plan] = {}
        self._shapes: dict[Any, Any] = {}

    def __torch_dispatch__(self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._collective is not None and function.namespace in ("c10d", "_c10d_functional"):
            return self._collective(function, args, kwargs)
        plan = self._plans.get(function)
        if plan is None:
            plan = self._plans[function] = _Plan(function)
        if plan.is_free:
            return function(*args, **kwargs)
        given = tensors_of((args, kwargs) if kwargs else args)
        result = function(*args, **kwargs) if self._limit is None else self._result(plan, function, args, kwargs, given)
        done = SkippedOperation(function, args, kwargs, given, result, tensors_of(result))
        for watcher in self._watchers:
            watcher.performed(done)
        return result

    def _result(
        self, plan: _Plan, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], tensors: list[torch.Tensor]
    ) -> Any:
        given = 0
        for tensor in tensors:
            if not tensor.is_cpu or tensor.layout is not torch.strided:
                return function(*args, **kwargs)  # stand-ins of other stages, and sparse gradients, which are small
            given += tensor.nbytes
        limit = self._limit or 0
        is_large = given > limit
        if plan.is_dynamic and not _picks_by_number(function, args):
            return self._unknown(function, args) if is_large else function(*args, **kwargs)
        if _device_of(kwargs) not in (None, "cpu"):
            return function(*args, **kwargs)
        if plan.mutates and is_large and None not in plan.written:
            return self._written(plan, args, kwargs)
        shapes = self._known_shapes(function, args, kwargs)
        if shapes is _UNKNOWN or given + _bytes(shapes) <= limit:
            return function(*args, **kwargs)
        return self._allocated(plan, function, shapes, args, kwargs)

    def _written(self, plan: _Plan, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the result of an in-place operation without writing anything."""
        results = [plan.argument(place, args, kwargs) for place in plan.written if place is not None]
        if not results:
            return None
        if len(results) == 1:
            return results[0]
        return tuple(results)

    def _known_shapes(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the structure of the result with a :class:`_Shape` for every tensor; ``_UNKNOWN`` without a meta kernel."""
        try:
            key = (function, _key(args), _key(tuple(sorted(kwargs.items()))))
            known = self._shapes.get(key)
        except TypeError:  # an argument that cannot be a key
            key, known = None, None
        if known is None:
            known = self._asked(function, args, kwargs)
            if key is not None:
                self._shapes[key] = known
        return known

    def _asked(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the same structure as :meth:`_known_shapes`, from PyTorch's kernel for the meta device."""
        on_meta: dict[str, Any] = {}
        for name, value in kwargs.items():
            if isinstance(value, torch.device):
                on_meta[name] = _META
            elif isinstance(value, torch.Generator):  # of another device
                on_meta[name] = None
            else:
                on_meta[name] = value
        takes_device = "device" in self._names(function) and not tensors_of(args)
        if takes_device:
            on_meta.setdefault("device", _META)
        try:
            result = function(*_meta(args), **_meta(on_meta))
        except RuntimeError:
            # There is no such kernel, or the operation itself is wrong: performing it then raises a better error.
            return _UNKNOWN
        return _shape(result) if isinstance(result, torch.Tensor) else tree_map(_shape, result)

    def _names(self, function: Any) -> list[str]:
        return self._plans[function].names

    def _allocated(self, plan: _Plan, function: Any, shapes: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return results with memory; results that the operation writes into arguments are these arguments."""

        def one(shape: Any, place: int | str | None) -> Any:
            if place is not None:
                return plan.argument(place, args, kwargs)

            def filled(leaf: Any) -> Any:
                return _memory(leaf, function) if isinstance(leaf, _Shape) else leaf

            return filled(shape) if isinstance(shape, _Shape) else tree_map(filled, shape)

        if len(plan.written) > 1:
            return tuple(one(shape, place) for shape, place in zip(shapes, plan.written, strict=True))
        return one(shapes, plan.written[0] if plan.written else None)

    def _unknown(self, function: Any, args: tuple[Any, ...]) -> Any:
        """Return True for ``equal``, and raise an error for other operations that depend on elements that were not computed."""
        if function is torch.ops.aten.equal.default:
            return True
        file, line = script_line()
        at = f" at {file}:{line}" if file else ""
        shapes = ", ".join(str(tuple(tensor.shape)) for tensor in tensors_of(args))
        raise SMPUserError(
            f"{function.__name__.partition('.')[0]}{at} asks for the values of a large tensor ({shapes}), whose elements a "
            "rehearsal does not compute, and the shape of its result depends on them; leave the call out where SMP_REHEARSAL is "
            "set, or take a form of fixed shape (torch.where, a mask that multiplies)",
            code="SMP120",
        )


_UNKNOWN = object()


def perform_unwatched() -> contextlib.AbstractContextManager[Any]:
    """Return a context in which operations of the calling thread are performed and not reported."""
    found: contextlib.AbstractContextManager[Any] = without_modes()
    return found


def tensors_of(value: Any) -> list[torch.Tensor]:
    """Return the tensors among arguments, also those in lists."""
    if isinstance(value, torch.Tensor):
        return [value]
    parts: Iterable[Any] = ()
    if isinstance(value, tuple | list):
        parts = value
    elif isinstance(value, dict):
        parts = value.values()
    tensors: list[torch.Tensor] = []
    for part in parts:
        tensors += tensors_of(part)
    return tensors


def _key(value: Any) -> Any:
    """Return the properties of an argument that decide the shape of a result.

    Equal arguments have equal keys; numbers are distinguished by their types.
    """
    if isinstance(value, torch.Tensor):
        return tuple(value.shape), value.stride(), value.dtype
    if isinstance(value, tuple | list):
        return tuple([_key(one) for one in value])
    if isinstance(value, torch.Generator):
        return "generator"
    return type(value), value


def _meta(value: Any) -> Any:
    """Replace tensors with memory in the arguments with meta tensors."""
    if isinstance(value, torch.Tensor):
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=_META)
    if isinstance(value, dict):
        return {name: _meta(one) for name, one in value.items()}
    if isinstance(value, list):
        return [_meta(one) for one in value]
    if isinstance(value, tuple):
        return tuple([_meta(one) for one in value])
    return value


def _shape(leaf: Any) -> Any:
    return _Shape(tuple(leaf.shape), leaf.stride(), leaf.dtype) if isinstance(leaf, torch.Tensor) else leaf


def _bytes(shapes: Any) -> int:
    if isinstance(shapes, _Shape):
        return shapes.nbytes
    return sum(_bytes(one) for one in shapes) if isinstance(shapes, tuple | list) else 0


def _memory(shape: _Shape, function: Any) -> torch.Tensor:
    """Return memory for a result. If it is small, it contains 1 for a number, 0 for an index, False for a boolean."""
    try:
        made = torch.empty_strided(shape.size, shape.stride, dtype=shape.dtype)
    except RuntimeError:
        return _mapped(shape)
    if shape.nbytes > _FILLED_BYTES:
        return made
    # So a loss is finite, and "are all gradients finite?" is answered with yes.
    is_number = shape.dtype.is_floating_point or shape.dtype.is_complex
    is_true = packet_of(function) is torch.ops.aten.all
    made.fill_(1 if is_number or is_true else 0)
    return made


def _mapped(shape: _Shape) -> torch.Tensor:
    """Return memory that the system would not allocate because it has less: a job's GPU may have more than this machine.

    Pages that are not written take none. Its storage cannot be resized.
    """
    reach = 1 + sum((size - 1) * stride for size, stride in zip(shape.size, shape.stride, strict=True))
    pages = mmap.mmap(-1, reach * shape.dtype.itemsize, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE)
    return torch.frombuffer(pages, dtype=shape.dtype).as_strided(shape.size, shape.stride)


def as_fused(attention: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Return ``F.scaled_dot_product_attention`` with the memory of a GPU's kernel, which drops scores without keeping any.

    The CPU has such a kernel only without dropout. With dropout, all scores are kept, ``[batch, heads, seq, seq]``. Ranks that
    share sequences out compute dropped scores block by block on a GPU too, and keep none.
    """

    @functools.wraps(attention)
    def fused(
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0,
        *args: Any,
        **kwargs: Any,
    ) -> torch.Tensor:
        dropped = dropout_p if isinstance(query, ShardedSequence) else 0.0
        return attention(query, key, value, attn_mask, dropped, *args, **kwargs)

    return fused


def _picks_by_number(function: Any, args: Sequence[Any]) -> bool:
    """Return whether an indexing operation returns as many elements as it has indices, because none of them is a mask."""
    if function is not torch.ops.aten.index.Tensor:
        return False
    return all(index is None or index.dtype not in (torch.bool, torch.uint8) for index in args[1])


def _device_of(kwargs: dict[str, Any]) -> str | None:
    device = kwargs.get("device")
    return None if device is None else torch.device(device).type


def _are_views(returns: Sequence[Any]) -> bool:
    """Return whether an operation's results, given by their aliases, are memory of its arguments that it does not write to."""
    if not returns:
        return False
    return all(alias is not None and not alias.is_write for alias in returns)


def _written_places(schema: Any) -> dict[str, int | str]:
    """Return where the written arguments are, by their names in the schema's aliases: a position, or a keyword."""
    places: dict[str, int | str] = {}
    for position, argument in enumerate(schema.arguments):
        if not _is_written(argument.alias_info):
            continue
        place = argument.name if argument.kwarg_only else position
        for name in argument.alias_info.before_set:
            places[name] = place
    return places


def _is_written(alias: Any) -> bool:
    """Return whether an operation writes into the argument, or returns the one that it has written, with this alias."""
    return alias is not None and alias.is_write
