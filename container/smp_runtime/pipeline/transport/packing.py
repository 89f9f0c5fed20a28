"""Packing of arguments and outputs into a few bytes and a list of tensors, and unpacking."""

from __future__ import annotations

import enum
import io
import pickle
import types
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import nn

from smp_runtime.errors import SMPRuntimeError, SMPUserError
from smp_runtime.tensors.lazy_tensor import LazyTensor
from smp_runtime.tensors.remote_tensor import RemoteTensor


class Packed(NamedTuple):
    """A tree without its tensors."""

    head: bytes  # equal for trees of equal structure, so that it can be compared and used as a key
    #: Each tensor once, in the order of first appearance; never touched, so they may be handles.
    tensors: list[torch.Tensor]
    mutable: bool  # whether the tree holds anything that a callee could change and its caller would see


def pack(tree: Any, *, modules: Mapping[int, str] | None = None) -> Packed:
    """Take the tensors out of a tree and pickle the rest.

    Containers, dataclasses, caches and all other picklable objects keep their types. An object that is in the tree
    more than once arrives once. Devices of an accelerator arrive as the receiver's own.

    Args:
        tree: ``(args, kwargs)`` of a call, or an output.
        modules: paths of the model's modules by ``id``; these travel as their path.

    Raises:
        SMPUserError: something in the tree cannot be pickled; the message names its place.
    """
    return _gathered(_pack(tree, modules or {}))


def _gathered(packed: Packed) -> Packed:
    """Gather tensors that are split over several ranks; all of these ranks come here in the same order."""
    if not any(_is_split(tensor) for tensor in packed.tensors):
        return packed
    tensors: list[torch.Tensor] = []
    for tensor in packed.tensors:
        tensors.append(cast("LazyTensor", tensor).plain() if _is_split(tensor) else tensor)
    return packed._replace(tensors=tensors)


def _is_split(tensor: torch.Tensor) -> bool:
    # A remote tensor is lazy too, but whole: it travels as a handle.
    return isinstance(tensor, LazyTensor) and not isinstance(tensor, RemoteTensor)


def _pack(tree: Any, modules: Mapping[int, str]) -> Packed:
    if (common := _common(tree)) is not None:
        return common
    arguments = tree[1] if _is_call(tree) else None
    try:
        try:
            return _packed(tree, modules, arguments, shared=False)
        except _SharedObject:
            return _packed(tree, modules, arguments, shared=True)
    except Exception as error:  # pickling runs code of any class, which may raise anything
        where, culprit, cause = _find_culprit(tree, modules) or ("the value", tree, error)
        raise SMPUserError(
            f"{where} is a {_type_name(culprit)}, which cannot travel to another stage ({_first_line(cause)}); what a module "
            "on another stage gets and returns is pickled: pass data instead (tensors, numbers, strings, containers, "
            "objects of importable classes), or keep caller and module on one stage with smp.set_partition(module, stage)",
            code="SMP306",
        ) from error


def unpack(head: bytes, tensors: Sequence[Any], *, module_of: Callable[[str], nn.Module] | None = None) -> Any:
    """Return the tree that :func:`pack` took apart.

    Args:
        head: of the :class:`Packed`.
        tensors: the replacement of each of its tensors, in the same order.

    Raises:
        SMPRuntimeError: a class or function of the tree does not exist here.
    """
    if (count := _counts.get(head)) is not None:
        return (tensors[0], None) if count == 0 else (tuple(tensors), {})
    unpickler = _Unpickler(io.BytesIO(head))
    unpickler.tensors = tensors
    unpickler.module_of = module_of
    try:
        return unpickler.load()
    except (AttributeError, ImportError, TypeError, pickle.UnpicklingError) as error:
        raise SMPRuntimeError(
            f"arguments or outputs from another stage cannot be rebuilt here ({_first_line(error)}); their classes must be "
            "importable on every rank: define them at the top level of a module that all ranks import"
        ) from error


# How an object is treated, by its type. Plain ones cannot change, so equal ones may stand for each other.
_PLAIN, _TENSOR, _MODULE, _DEVICE, _FROZEN_SET, _SET, _MUTABLE, _WRAPPER = range(8)

_PLAIN_TYPES = (
    type(None), bool, int, float, complex, str, bytes, tuple, range, slice, type(...), type(NotImplemented),
    torch.Size, torch.dtype, torch.layout, torch.memory_format,
    types.FunctionType, types.BuiltinFunctionType, types.MethodType, types.ModuleType,
)  # fmt: skip
#: Grows with the types that are seen.
_treatments: dict[type, int] = {frozenset: _FROZEN_SET, set: _SET, torch.device: _DEVICE}


#: Classes of tensors that travel in parts, with what takes one apart: into a function and its arguments, as for a pickle.
_taken_apart: dict[type, Callable[[Any], tuple[Any, ...]]] = {}


def register_wrapper(type_: type, take_apart: Callable[[Any], tuple[Any, ...]]) -> None:
    """Let tensors of a class travel in parts; parts that are tensors travel like other tensors."""
    _taken_apart[type_] = take_apart
    _treatments.pop(type_, None)


def _treatment(type_: type) -> int:
    if type_ in _taken_apart:
        result = _WRAPPER
    elif issubclass(type_, torch.Tensor):
        result = _TENSOR
    elif issubclass(type_, nn.Module):
        result = _MODULE
    elif type_ in _PLAIN_TYPES or issubclass(type_, (type, enum.Enum)):
        result = _PLAIN
    elif issubclass(type_, _PLAIN_TYPES) and not type_.__dictoffset__:
        result = _PLAIN  # named tuples and their like
    else:
        result = _MUTABLE
    _treatments[type_] = result
    return result


class _SharedObject(Exception):
    """A signal that a mutable object is in the tree more than once."""


class _Pickler(pickle.Pickler):
    """A pickler of a tree without its tensors.

    Ordinarily, a pickle contains a reference for each object that it meets twice, including equal strings and
    tuples. So its bytes depend on which of them happen to be one object. Without that memory (``fast``) equal
    structures have equal bytes, but an object in two places would arrive as two. So the memory is used only for
    trees in which a mutable object is in two places.
    """

    def __init__(self, buffer: io.BytesIO, modules: Mapping[int, str], arguments: dict | None, shared: bool) -> None:
        super().__init__(buffer, 5)
        self.fast = not shared
        self.tensors: list[torch.Tensor] = []
        self.mutable = False
        self._modules = modules
        self._arguments = arguments
        self._index: dict[int, int] = {}
        # Objects by id, kept alive: the id of a temporary one may come again.
        self._seen: dict[int, Any] = {}
        self._strings: dict[str, str] = {}

    def persistent_id(self, obj: Any) -> Any:
        """Return the replacement of an object in the pickle; None if its own content is pickled."""
        type_ = type(obj)
        kind = _treatments.get(type_)
        if kind is None:
            kind = _treatment(type_)
        if kind == _PLAIN:
            if type_ is not str or self.fast:
                return None
            # One object for all equal strings, so that the pickler's memory does not depend on interning.
            return self._strings.setdefault(obj, obj)
        if kind == _TENSOR:
            index = self._index.setdefault(id(obj), len(self.tensors))
            if index == len(self.tensors):
                self.tensors.append(obj)
            return index
        if kind == _MODULE and id(obj) in self._modules:
            return "module", self._modules[id(obj)]
        if kind == _DEVICE:
            is_numbered = obj.index is not None and obj.type != "cpu"
            return ("device", obj.type) if is_numbered else None
        if kind == _WRAPPER:  # its parts are objects of their own
            return None
        if kind == _FROZEN_SET:
            return "frozenset", tuple(sorted(obj, key=_sort_key))
        return self._changeable(obj, kind)

    def reducer_override(self, obj: Any) -> Any:
        """Return what stands for an object in the pickle, in place of what it says itself."""
        apart = _taken_apart.get(type(obj))
        return NotImplemented if apart is None else apart(obj)

    def _changeable(self, obj: Any, kind: int) -> Any:
        """Record that the tree has something that a callee could change, and return its replacement or None."""
        if obj is not self._arguments:
            self.mutable = True
        if self.fast:
            if id(obj) in self._seen:
                raise _SharedObject
            self._seen[id(obj)] = obj
            if kind == _SET:
                return "set", tuple(sorted(obj, key=_sort_key))
        return None


class _Unpickler(pickle.Unpickler):
    tensors: Sequence[Any]
    module_of: Callable[[str], nn.Module] | None

    def persistent_load(self, pid: Any) -> Any:
        """Return the object for a replacement from :meth:`_Pickler.persistent_id`."""
        if type(pid) is int:
            return self.tensors[pid]
        if type(pid) is str:
            return pid
        kind, value = pid
        if kind == "module":
            if self.module_of is None:
                raise AssertionError("a tree with modules, but nothing that finds them")
            return self.module_of(value)
        if kind == "device":
            return torch.device(value, torch.get_device_module(value).current_device())
        return set(value) if kind == "set" else frozenset(value)


def _sort_key(element: Any) -> tuple[str, str]:
    """Return the sort key of a set's element in the head; an order by hash would differ from process to process."""
    if type(element) is tuple:
        return "tuple", str([_sort_key(each) for each in element])
    plain = isinstance(element, (str, bytes, int, float, complex, type(None)))
    return type(element).__qualname__, repr(element) if plain else ""


def _common(tree: Any) -> Packed | None:
    """Pack a call with only tensors, or one tensor as a result, without pickling; return None for other trees.

    The head is the same as from pickling.
    """
    if type(tree) is not tuple or len(tree) != 2:
        return None
    first, second = tree
    if second is None and _is_whole(first):
        return Packed(_heads[0], [first], False)
    # Exact types: a subclass may hold more than its elements, which pickling keeps.
    is_positional_call = type(first) is tuple and type(second) is dict and not second
    if not is_positional_call or not first:
        return None
    head = _heads.get(len(first))
    if head is None or not _are_distinct_tensors(first):
        return None
    return Packed(head, list(first), False)


def _are_distinct_tensors(values: Sequence[Any]) -> bool:
    if not all(_is_whole(each) for each in values):
        return False
    identities = {id(each) for each in values}
    return len(identities) == len(values)


def is_plain_result(value: Any) -> bool:
    """Return whether a result is one tensor with elements, which :func:`pack` leaves as it is: its head is `SINGLE_TENSOR`."""
    return _is_whole(value) and not isinstance(value, LazyTensor)


def _is_whole(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and type(value) not in _taken_apart


def _is_call(tree: Any) -> bool:
    if type(tree) is not tuple or len(tree) != 2:
        return False
    return type(tree[0]) is tuple and type(tree[1]) is dict


def _packed(tree: Any, modules: Mapping[int, str], arguments: dict | None, shared: bool) -> Packed:
    buffer = io.BytesIO()
    pickler = _Pickler(buffer, modules, arguments, shared)
    pickler.dump(tree)
    return Packed(buffer.getvalue(), pickler.tensors, pickler.mutable)


def _find_culprit(tree: Any, modules: Mapping[int, str]) -> tuple[str, Any, Exception] | None:
    """Return the innermost object that cannot be pickled: its place, the object, and the error."""
    seen: set[int] = set()

    def search(where: str, obj: Any) -> tuple[str, Any, Exception] | None:
        if id(obj) in seen or isinstance(obj, torch.Tensor):
            return None
        try:
            _packed(obj, modules, None, shared=True)
            return None
        except Exception as error:  # likewise
            seen.add(id(obj))
            for label, child in _parts(obj):
                found = search(where + label, child)
                if found:
                    return found
            return where, obj, error

    if _is_call(tree):
        return search("args", tree[0]) or search("kwargs", tree[1])
    return search("the value", tree)


def _parts(obj: Any) -> Iterator[tuple[str, Any]]:
    """Yield the parts of an object, each with the code that leads to it, such as ``.name`` or ``[0]``."""
    yield from _contents(obj)
    if isinstance(obj, (type, types.FunctionType, types.ModuleType)):
        return  # these are pickled by name
    for key, value in getattr(obj, "__dict__", {}).items():
        yield f".{key}", value
    for key in _slots(type(obj)):
        if hasattr(obj, key):
            yield f".{key}", getattr(obj, key)


def _contents(obj: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(obj, dict):
        for key, value in obj.items():
            yield f"[{key!r}]".replace("'", '"'), value
    elif isinstance(obj, tuple) and hasattr(obj, "_fields"):
        for field, value in zip(obj._fields, obj, strict=True):
            yield f".{field}", value
    elif isinstance(obj, (list, tuple)):
        for position, value in enumerate(obj):
            yield f"[{position}]", value


def _chooses_what_to_pickle(type_: type) -> bool:
    own_methods: set[str] = set()
    for base in type_.__mro__[:-1]:  # without ``object``, which has such methods itself
        own_methods |= base.__dict__.keys() & {"__getstate__", "__reduce__"}
    return bool(own_methods)


def _slots(type_: type) -> list[str]:
    names = []
    for base in type_.__mro__:
        slots = base.__dict__.get("__slots__", ())
        # A class may give its only slot as plain text.
        if isinstance(slots, str):
            slots = (slots,)
        names += [_mangled(base, slot) for slot in slots]
    return [name for name in names if name not in ("__dict__", "__weakref__")]


def _mangled(base: type, slot: str) -> str:
    # Python stores a private slot under the name of its class.
    is_private = slot.startswith("__") and not slot.endswith("__")
    return f"_{base.__name__.lstrip('_')}{slot}" if is_private else slot


def _type_name(obj: Any) -> str:
    type_ = type(obj)
    kind = type_.__qualname__ if type_.__module__ == "builtins" else f"{type_.__module__}.{type_.__qualname__}"
    return f"{kind} {obj.__qualname__}" if isinstance(obj, (types.FunctionType, types.MethodType)) else kind


def _first_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0]


def _common_head(count: int) -> bytes:
    """Return the pickled head of a call with ``count`` tensors; for 0, that of one tensor as a result."""
    tensors = tuple(torch.empty(0, device="cpu") for _ in range(max(count, 1)))
    tree: Any = (tensors, {}) if count else (*tensors, None)
    return _packed(tree, {}, tree[1], shared=False).head


#: The heads of the most common trees, by the number of arguments of a call, 0 for one tensor as a result; and back.
_heads = {count: _common_head(count) for count in range(5)}
_counts = {head: count for count, head in _heads.items()}
#: Head of a result that is one tensor, and has changed no argument.
SINGLE_TENSOR = _heads[0]


def restore_into(original: Any, changed: Any) -> None:
    """Make the caller's arguments equal to the callee's after the call, as if both had worked on the same objects.

    Lists, dictionaries, sets and objects keep their identity and get the new contents, recursively if the types
    agree. If they do not, the callee's object replaces the old one. Tensors are replaced, never written to, and
    unchanged ones stay.

    Args:
        original: the caller's tree, such as ``(args, kwargs)``.
        changed: the tree of the same structure that the callee had, after it ran.
    """
    _Restorer().merge(original, changed)


class _Restorer:
    def __init__(self) -> None:
        # Results by id of the original; an object in two places is restored once, one that holds itself ends.
        self._done: dict[int, Any] = {}

    def merge(self, old: Any, new: Any) -> Any:
        """Return the object that replaces ``old``: ``old`` itself if it can take the new contents."""
        kind = _treatments.get(type(old))
        if kind is None:
            kind = _treatment(type(old))
        if old is new or type(old) is not type(new):
            return new
        if isinstance(old, tuple):
            return self._merge_tuple(old, new)
        if kind not in (_MUTABLE, _SET, _MODULE):
            return new
        if id(old) not in self._done:
            self._done[id(old)] = old
            self._done[id(old)] = self._fill(old, new)
        return self._done[id(old)]

    def _merge_tuple(self, old: Any, new: Any) -> Any:
        # Its own identity does not matter, that of the lists in it does.
        merged = [*map(self.merge, old, new), *new[len(old) :]]
        has_attributes = bool(type(old).__dictoffset__)
        if has_attributes or len(old) != len(new) or isinstance(old, torch.Size):
            return new
        is_unchanged = all(a is b for a, b in zip(merged, old, strict=True))
        if is_unchanged:
            return old
        return tuple.__new__(type(old), merged)

    def _fill(self, old: Any, new: Any) -> Any:
        if isinstance(old, list):
            list.__setitem__(old, slice(None), [*map(self.merge, old, new), *new[len(old) :]])
        elif isinstance(old, dict):
            self._fill_dict(old, new, keep=False)
        elif isinstance(old, set):
            contents = list(new)
            old.clear()
            old.update(contents)
        elif isinstance(old, bytearray) or hasattr(old, "extendleft"):
            contents = list(new)
            old.clear()
            old.extend(contents)
        elif hasattr(old, "__array_interface__"):
            is_alike = old.shape == new.shape and old.dtype == new.dtype
            if not is_alike or not old.flags.writeable:
                return new
            old[...] = new
        elif not hasattr(old, "__dict__") and not _slots(type(old)):
            return new  # opaque: nothing of it can be changed from here
        self._fill_attributes(old, new)
        return old

    def _fill_attributes(self, old: Any, new: Any) -> None:
        # Attributes that a class leaves out of its pickle are missing in the callee's copy, but not deleted.
        partial = _chooses_what_to_pickle(type(old))
        if hasattr(old, "__dict__"):
            self._fill_dict(old.__dict__, new.__dict__, keep=partial)
        for name in _slots(type(old)):
            if hasattr(new, name):
                object.__setattr__(old, name, self.merge(getattr(old, name, None), getattr(new, name)))
            elif hasattr(old, name) and not partial:
                object.__delattr__(old, name)

    def _fill_dict(self, old: dict, new: dict, keep: bool) -> None:
        """Fill a dictionary by the methods of ``dict`` or ``OrderedDict``, since subclasses forbid or extend some."""
        base: Any = OrderedDict if isinstance(old, OrderedDict) else dict
        merged = {}
        for key, value in new.items():
            merged[key] = self.merge(old[key], value) if key in old else value
        # The callee's class left these out of its pickle; the callee did not delete them.
        if keep:
            kept = {key: value for key, value in old.items() if key not in merged}
            merged = {**kept, **merged}
        # Keys that stay in a dictionary keep their places: for another order it must be empty first.
        if list(old) != list(merged):
            for key in list(old):
                base.__delitem__(old, key)
        for key, value in merged.items():
            base.__setitem__(old, key, value)
