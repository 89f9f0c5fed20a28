"""Operations on each element: a rank computes those at its positions."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from smp_runtime.context.sequence import ShardedSequence, gather_all, rule, sequences_in, writes
from smp_runtime.tensors.torch_private import tree_map

if TYPE_CHECKING:
    from smp_runtime.context.layout import SequenceLayout

_UNARY = (
    "abs absolute neg negative positive exp exp2 expm1 log log2 log10 log1p sqrt rsqrt square reciprocal sign sgn signbit "
    "sin cos tan asin acos atan sinh cosh tanh asinh acosh atanh arcsin arccos arctan erf erfc erfinv sigmoid logit floor "
    "ceil round trunc frac fix relu relu6 relu_ gelu silu mish elu elu_ selu celu leaky_relu leaky_relu_ hardtanh "
    "hardtanh_ hardswish hardsigmoid hardshrink softplus softsign softshrink tanhshrink threshold logsigmoid lgamma digamma "
    "i0 sinc nan_to_num isnan isinf isfinite isposinf isneginf isreal logical_not bitwise_not deg2rad rad2deg clone detach "
    "contiguous float double half bfloat16 int long short bool byte char cpu cuda zeros_like ones_like full_like empty_like "
    "conj conj_physical __neg__ __abs__ __invert__ __pos__ pin_memory"
).split()

_BINARY = (
    "add sub subtract mul multiply div divide true_divide floor_divide remainder fmod pow float_power atan2 arctan2 maximum "
    "minimum fmax fmin copysign hypot logaddexp logaddexp2 eq ne lt le gt ge greater greater_equal less less_equal "
    "not_equal logical_and logical_or logical_xor bitwise_and bitwise_or bitwise_xor bitwise_left_shift bitwise_right_shift "
    "xlogy heaviside nextafter isclose __add__ __radd__ __sub__ __rsub__ __mul__ __rmul__ __truediv__ __rtruediv__ __div__ "
    "__rdiv__ __floordiv__ __rfloordiv__ __mod__ __rmod__ __pow__ __rpow__ __eq__ __ne__ __lt__ __le__ __gt__ __ge__ "
    "__and__ __rand__ __or__ __ror__ __xor__ __rxor__ __lshift__ __rshift__ rsub clamp clamp_min clamp_max clip where "
    "masked_fill lerp addcmul addcdiv"
).split()

_IN_PLACE = (
    "add_ sub_ mul_ multiply_ div_ divide_ true_divide_ pow_ masked_fill_ clamp_ clamp_min_ clamp_max_ clip_ exp_ log_ "
    "sqrt_ rsqrt_ tanh_ sigmoid_ relu_ neg_ abs_ zero_ fill_ copy_ round_ floor_ ceil_ trunc_ square_ reciprocal_ "
    "nan_to_num_ lerp_ addcmul_ addcdiv_ logical_not_ logical_and_ logical_or_ bitwise_and_ bitwise_or_ bitwise_not_ eq_ "
    "ne_ lt_ le_ gt_ ge_ remainder_ fmod_ __iadd__ __isub__ __imul__ __itruediv__ __ifloordiv__ __imod__ __ipow__ __iand__ "
    "__ior__ __ixor__ silu_"
).split()


def align(value: Any, layout: SequenceLayout, dim: int, like: ShardedSequence, why: str) -> Any:
    """Return the part of an operand that this rank's positions meet.

    Args:
        dim: counted from the last, negative, as broadcasting counts.
        like: a sequence with the layout.
    """
    if not isinstance(value, torch.Tensor):
        return value
    if isinstance(value, ShardedSequence):
        if value.sequence_layout == layout and value.dim_held - value.dim() == dim:
            return value.local
        if value.dim_held - value.dim() == dim and _are_of_one_length(value.sequence_layout, layout):
            return like.group.move(value.local, value.dim_held, value.sequence_layout, layout)
        value = value.whole(why)
    if value.dim() < -dim or value.shape[dim] != layout.size:
        return value
    return like.group.take(value, dim % value.dim(), layout)


def _are_of_one_length(one: SequenceLayout, other: SequenceLayout) -> bool:
    return (one.length, one.outer, one.inner) == (other.length, other.outer, other.inner)


def run_aligned(
    name: str, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], first: ShardedSequence
) -> Any:
    """Run an operation that broadcasts on slices, and return its results as sequences."""
    dim = first.dim_held - first.dim()
    slices = [_part(value, first, dim, name) for value in args]
    result = func(*slices, **{key: _part(value, first, dim, name) for key, value in kwargs.items()})
    return wrap(result, first, dim)


# An inner function that calls itself would be a reference cycle, which keeps the sequence until the garbage collector runs.
def _part(value: Any, first: ShardedSequence, dim: int, name: str) -> Any:
    """Return this rank's positions of an argument, or of each item of a list."""
    if isinstance(value, tuple | list):
        return type(value)(_part(item, first, dim, name) for item in value)
    return align(value, first.sequence_layout, dim, first, name)


def wrap(result: Any, first: ShardedSequence, dim: int) -> Any:
    """Return results that hold this rank's positions as sequences; ``dim`` counts from the last."""
    if isinstance(result, torch.Tensor):
        return first.like(result, result.dim() + dim)
    return tree_map(lambda leaf: first.like(leaf, leaf.dim() + dim) if isinstance(leaf, torch.Tensor) else leaf, result)


@rule(*_UNARY, *_BINARY)
def compute_pointwise(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Compute an operation that broadcasts."""
    if "out" in kwargs or kwargs.get("inplace"):
        return _change_pointwise(func, args, kwargs) if kwargs.get("inplace") else NotImplemented
    if func.__name__ == "where" and len(args) + len(kwargs) == 1:
        return NotImplemented
    # Of several sequences the one with most dims decides, so that others broadcast to it.
    # One of a single position cannot: others may have more.
    first = max(
        sequences_in((args, kwargs)),
        key=lambda one: (one.sequence_layout.size > 1, one.dim(), one.is_floating_point()),
    )
    if first.sequence_layout.size == 1 and _have_more((*args, *kwargs.values()), first.dim_held - first.dim()):
        return NotImplemented
    return run_aligned(func.__name__, func, args, kwargs, first)


def _have_more(values: tuple[Any, ...], dim: int) -> bool:
    """Return whether whole tensors have several positions in a dim, counted from the last."""
    return any(isinstance(one, torch.Tensor) and one.dim() >= -dim and one.shape[dim] > 1 for one in values)


@rule(*_IN_PLACE)
def _change_pointwise(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    changed = args[0]
    if not isinstance(changed, ShardedSequence):  # a whole tensor takes over values of a sequence
        return func(changed, *gather_all(args[1:], func.__name__), **gather_all(kwargs, func.__name__))
    if not (writes(func.__name__) or kwargs.get("inplace")):
        return NotImplemented
    run_aligned(func.__name__, func, args, kwargs, changed)
    return changed


@rule("to", "type_as")
def _convert(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    others = [other.local if isinstance(other, ShardedSequence) else other for other in args[1:]]
    if not isinstance(args[0], ShardedSequence):  # it takes over the kind of a sequence
        return func(args[0], *others, **kwargs)
    if isinstance(kwargs.get("other"), ShardedSequence):
        kwargs = {**kwargs, "other": kwargs["other"].local}
    converted = func(args[0].local, *others, **kwargs)
    return args[0] if converted is args[0].local else args[0].like(converted)


@rule("new_tensor")
def _make_of_data(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    kind, *data = (one.local if isinstance(one, ShardedSequence) else one for one in args)
    made = func(kind, *data, **kwargs)  # a whole tensor of the same kind, unless its data are a sequence
    return args[1].like(made) if len(args) > 1 and isinstance(args[1], ShardedSequence) else made


@rule("new_zeros", "new_ones", "new_full", "new_empty")
def _make_new(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Make a tensor that a script will fill; cut, if it has the positions of the sequence in the same place."""
    sequence = args[0]
    if "size" in kwargs:
        size, rest = list(kwargs["size"]), args[1:]
    elif isinstance(args[1], int):  # sizes one by one
        size, rest = list(args[1:]), ()
    else:
        size, rest = list(args[1]), args[2:]
    others = {key: value for key, value in kwargs.items() if key != "size"}
    held = sequence.dim_held
    if len(size) != sequence.dim() or size[held] != sequence.shape[held]:
        return func(sequence.local, size, *rest, **others)
    size[held] = sequence.local.shape[held]
    return sequence.like(func(sequence.local, size, *rest, **others))


@rule("F.embedding")
def _embed(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    index = args[0] if args else kwargs["input"]
    if len(sequences_in((args, kwargs))) != 1 or not isinstance(index, ShardedSequence):
        return NotImplemented
    names = ("input", "weight", "padding_idx", "max_norm", "norm_type", "scale_grad_by_freq", "sparse")
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    if given.get("max_norm") is not None or given.get("scale_grad_by_freq"):
        return NotImplemented  # they depend on all the numbers
    rest = {key: value for key, value in kwargs.items() if key != "input"}
    return index.like(func(index.local, *args[1:], **rest))


@rule("one_hot")
def _encode(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    index = args[0]
    if not isinstance(index, ShardedSequence) or (len(args) < 2 and kwargs.get("num_classes", -1) < 0):
        return NotImplemented  # the number of classes is in all ranks' values
    return index.like(func(index.local, *args[1:], **kwargs))
