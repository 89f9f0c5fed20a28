"""Batches of a script without a ``DataLoader``: the results of a function that the user has named, such as ``get_batch``.

Each call in which gradients are recorded returns the next batch. Calls of an evaluation, under ``torch.no_grad()``, are left alone:
often rank 0 makes them alone, and they do not change the training.
"""

from __future__ import annotations

import ast
import importlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch

from smp_runtime.errors import SMPRuntimeError

if TYPE_CHECKING:
    from smp_tools.numerics.plain.batches import JoinedBatches, RankBatches

#: The decorator's name in the script.
_DECORATOR = "__smp_batches__"


class _Calls(Iterator[Any]):
    """The results of a function, call by call; ``next_call`` has the arguments."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function
        self.next_call: tuple[tuple[Any, ...], dict[str, Any]] = ((), {})

    def __next__(self) -> Any:
        args, kwargs = self.next_call
        return self._function(*args, **kwargs)


class BatchFunction:
    """A function of the script, in whose place each rank records batches, and the one process gets joined ones.

    Args:
        replays: the batches are those that ranks have recorded.
    """

    def __init__(
        self, function: Callable[..., Any], batches: RankBatches | JoinedBatches, *, replays: bool = False
    ) -> None:
        self._function, self._batches, self._replays = function, batches, replays
        self._calls = _Calls(function)
        self._stream: Iterator[Any] | None = None
        batches.book.number(self)  # type: ignore[arg-type]  # it stands for a loader without a sampler

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return the next batch, or an iterator over the batches of an epoch if the function returns one."""
        if not torch.is_grad_enabled():
            return self._function(*args, **kwargs)
        if self._stream is None:
            first = self._function(*args, **kwargs)
            if isinstance(first, Iterator):
                return self._iterate(first)
            self._stream = self._iterate(_after(first, self._calls))
        self._calls.next_call = (args, kwargs)
        try:
            return next(self._stream)
        except StopIteration:
            return self._behind_the_last(args, kwargs)

    def _iterate(self, own: Iterator[Any]) -> Iterator[Any]:
        return self._batches.iterate(self, iter(()) if self._replays else own)  # type: ignore[arg-type]

    def _behind_the_last(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return a batch for a call after all recorded updates."""
        if self._replays:
            raise SMPRuntimeError(
                f"one process calls {self._function.__name__} more often than a rank did before the last recorded update: let the "
                "number of calls for each update not depend on the number of ranks"
            )
        return self._function(*args, **kwargs)


def _after(first: Any, rest: Iterator[Any]) -> Iterator[Any]:
    yield first
    yield from rest


def run_with_batches(script: str, name: str, wrap: Callable[[Callable[..., Any]], Any]) -> None:
    """Run a script as ``__main__``, with one function replaced when it is defined.

    Args:
        name: of a function of the script, or ``module:function``.
        wrap: returns what takes the function's place.
    """
    place, _, function = name.rpartition(":")
    tree = ast.parse(Path(script).read_bytes(), script)
    main = ModuleType("__main__")
    main.__file__ = script
    if place:
        module = importlib.import_module(place)
        setattr(module, function, wrap(getattr(module, function)))
    else:
        vars(main)[_DECORATOR] = wrap
        _decorate(tree, function)
    sys.modules["__main__"] = main  # what workers and pickles look names up in
    exec(compile(tree, script, "exec"), vars(main))


def _decorate(tree: ast.Module, function: str) -> None:
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and node.name == function:
            node.decorator_list.insert(0, ast.copy_location(ast.Name(_DECORATOR, ast.Load()), node))
    ast.fix_missing_locations(tree)
