"""``ShardedSequence``: a tensor with the shape of a whole sequence, of which each rank holds some positions."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch.overrides import resolve_name

from smp_runtime.context import copies
from smp_runtime.errors import SMPRuntimeError
from smp_runtime.tensors.torch_private import (
    make_without_elements,
    never_compiled,
    outside_transforms,
    tree_map,
)

if TYPE_CHECKING:
    from smp_runtime.context.exchange import ContextGroup
    from smp_runtime.context.layout import SequenceLayout


class Rule(Protocol):
    """Compute an operation on slices of sequences, or return ``NotImplemented`` to have them gathered first."""

    def __call__(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Compute ``func(*args, **kwargs)``."""


#: Rules by the operation's name without its owner (``add`` for ``torch.add`` and ``Tensor.add``), or with it.
RULES: dict[str, Rule] = {}

#: Names of arguments that PyTorch takes for NumPy's sake, and its own.
_NAMES_OF_NUMPY = {"axis": "dim", "keepdims": "keepdim"}

#: The rule of each function that was called, or None.
_rule_of: dict[Callable[..., Any], tuple[str, Rule | None]] = {}


#: Rules that read no element.
FACTS: set[Rule | None] = set()


def rule(*names: str) -> Callable[[Rule], Rule]:
    """Register a function as the rule of operations."""

    def register(function: Rule) -> Rule:
        for name in names:
            RULES[name] = function
        return function

    return register


class ShardedSequence(torch.Tensor):
    """A tensor of a whole sequence's shape; this rank holds its slice at some positions of one dim.

    It is computed on as the whole tensor would be: shapes, broadcasting, indices and reductions are those of the whole.

    Attributes:
        local: the slice, an ordinary tensor, with its graph.
        dim_held: the dim with the sequence.
        sequence_layout: the positions of each rank.
        group: the ranks.
    """

    local: torch.Tensor
    dim_held: int
    sequence_layout: SequenceLayout
    group: ContextGroup

    @staticmethod
    def __new__(
        cls: type[ShardedSequence], local: torch.Tensor, dim: int, layout: SequenceLayout, group: ContextGroup
    ) -> ShardedSequence:
        """Wrap a slice."""
        shape = list(local.shape)
        shape[dim] = layout.size
        made: ShardedSequence = make_without_elements(cls, shape, dtype=local.dtype, device=local.device)
        made.__dict__.update(local=local, dim_held=dim % local.dim(), sequence_layout=layout, group=group)
        return made

    def __init__(self, *_: Any) -> None:
        pass

    def like(
        self, local: torch.Tensor, dim: int | None = None, layout: SequenceLayout | None = None
    ) -> ShardedSequence:
        """Return another tensor of this sequence, or of one with another layout."""
        return ShardedSequence(local, self.dim_held if dim is None else dim, layout or self.sequence_layout, self.group)

    def whole(self, why: str) -> torch.Tensor:
        """Return the whole tensor, gathered from all ranks.

        Args:
            why: the operation that needs it, for the report.
        """
        before = self.group.received
        with outside_transforms():  # a function of positions may refer to a sequence, inside ``vmap``
            gathered = self.group.gather(self.local, self.dim_held, self.sequence_layout)
        self.group.gathered[why] = self.group.gathered.get(why, 0) + self.group.received - before
        return gathered

    @classmethod
    @never_compiled
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Run an operation by its rule, or on whole sequences."""
        kwargs = {_NAMES_OF_NUMPY.get(key, key): value for key, value in kwargs.items()} if kwargs else {}
        name, found = _rule_of.get(func) or _find_rule(func)
        if copies.are_there() and found not in FACTS:
            use = copies.Use(name, sequences_in((args, kwargs)), args)
            result = _run(name, found, func, args, kwargs)
            use.end()
            return result
        return _run(name, found, func, args, kwargs)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        """Refuse operations of C++ code that rules have not seen: their result would lack other ranks' positions.

        Raises:
            SMPRuntimeError: always.
        """
        if str(func) in ("aten.detach.default", "aten.alias.default"):  # of autograd, on the empty wrapper
            first: ShardedSequence = args[0]
            return first.like(first.local)
        raise SMPRuntimeError(
            f"{func} got a sequence that is cut over {args_group_size(args)} ranks, from code that context parallelism cannot see "
            "into; set context_parallel_degree to 1, or call the operation through torch"
        )

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"ShardedSequence(shape={list(self.shape)}, dim={self.dim_held}, local={self.local!r})"

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        return self.whole("deepcopy").__deepcopy__(memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.whole("pickle").__reduce_ex__(protocol)


def _run(name: str, found: Rule | None, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    result = NotImplemented if found is None else found(func, args, kwargs)
    return compute_whole(name, func, args, kwargs) if result is NotImplemented else result


def args_group_size(args: Any) -> int:
    """Return the number of ranks that share the first sequence in arguments out."""
    found = sequences_in(args)
    return found[0].group.size if found else 1


def _find_rule(func: Callable[..., Any]) -> tuple[str, Rule | None]:
    name = resolve_name(func) or getattr(func, "__qualname__", func.__name__)
    short = name.removesuffix(".__get__").rpartition(".")[2]
    owner = "F." if ".functional." in name else ""
    getter = "get:" if name.endswith(".__get__") else ""
    found = RULES.get(f"{owner}{getter}{short}") or (RULES.get(short) if not getter else None)
    _rule_of[func] = short, found
    return short, found


def sequences_in(value: Any) -> list[ShardedSequence]:
    """Return the sequences in the arguments of an operation."""
    if isinstance(value, ShardedSequence):
        return [value]
    if isinstance(value, dict):
        value = list(value.values())
    found: list[ShardedSequence] = []
    if isinstance(value, tuple | list):
        for item in value:
            found += sequences_in(item)
    return found


def gather_all(value: Any, why: str) -> Any:
    """Return a structure with whole tensors in place of sequences."""
    if isinstance(value, ShardedSequence):
        return value.whole(why)
    # Faster than a tree of one leaf, and frequent.
    if isinstance(value, torch.Tensor):
        return value
    return tree_map(lambda leaf: leaf.whole(why) if isinstance(leaf, ShardedSequence) else leaf, value)


def compute_whole(name: str, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Compute an operation without a rule on whole tensors, and cut what has the sequence's shape again.

    Raises:
        SMPRuntimeError: the operation writes to a tensor given as ``out``.
    """
    first = sequences_in((args, kwargs))[0]
    if isinstance(kwargs.get("out"), ShardedSequence):
        raise SMPRuntimeError(
            f"{name} writes its result to a tensor, out, that is cut over {first.group.size} ranks; take the result instead"
        )
    result = func(*(gathered := gather_all(args, name)), **gather_all(kwargs, name))
    if not writes(name):
        return result if "out" in kwargs else cut_results(result, first)
    if isinstance(args[0], list | tuple):  # several tensors at once
        for one, whole in zip(args[0], gathered[0], strict=True):
            if isinstance(one, ShardedSequence):
                write_back(one, whole, name)
        return result
    return write_back(args[0], gathered[0], name) if isinstance(args[0], ShardedSequence) else result


#: Operations with other names than those that end in one underscore that change their first argument.
_WRITING = frozenset(
    f"__{name}__"
    for name in ("setitem", "iadd", "isub", "imul", "itruediv", "ifloordiv", "imod", "ipow", "iand", "ior", "ixor")
)


def writes(name: str) -> bool:
    """Return whether an operation changes its first argument in place."""
    return name in _WRITING or (name.endswith("_") and not name.endswith("__"))


def write_back(written: ShardedSequence, changed: torch.Tensor, name: str) -> ShardedSequence:
    """Let a sequence have the values of a whole tensor that was changed in its place.

    Raises:
        SMPRuntimeError: the operation has changed the shape.
    """
    if changed.shape != written.shape:
        raise SMPRuntimeError(
            f"{name} changes a sequence that is cut over {written.group.size} ranks in a way that context parallelism cannot "
            "follow; use the form of it that returns a new tensor"
        )
    written.local.copy_(written.group.take(changed, written.dim_held, written.sequence_layout))
    return written


def cut_results(
    result: Any, like: ShardedSequence, cut: Callable[[torch.Tensor], ShardedSequence] | None = None
) -> Any:
    """Return results with those cut again that have the sequence in the same dim; any tensor may be cut or whole.

    Args:
        cut: returns a sequence of a whole tensor, in place of its plain cut.
    """
    made = cut or (lambda leaf: like.like(like.group.take(leaf, like.dim_held, like.sequence_layout)))

    def change(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor) or isinstance(leaf, ShardedSequence) or leaf.dim() != like.dim():
            return leaf
        return made(leaf) if leaf.shape[like.dim_held] == like.sequence_layout.size else leaf

    return change(result) if isinstance(result, torch.Tensor) else tree_map(change, result)
