"""Buffers with new values that depend on their old ones: running averages, sums and counters.

Such a buffer must not be in half precision: with a decay of 0.999 a change is smaller than the rounding, and it never
moves. The source of a module's class shows the names: they follow from the effects of ``forward``, and of the methods
that it calls, on ``self.NAME``. The result is the same on every rank and before the first step.
"""

from __future__ import annotations

import ast
import functools
import inspect
import textwrap
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch import nn

from smp_runtime.tensors.torch_private import NORMS_WITH_STATISTICS

#: Methods of tensors that write without a look at the old value, so that rounding does not add up.
_OVERWRITING = {
    "copy_",
    "fill_",
    "zero_",
    "normal_",
    "uniform_",
    "random_",
    "bernoulli_",
    "set_",
    "resize_",
    "requires_grad_",
}
#: PyTorch's norms of weights multiply their buffers by the weight, so both need one type. Each value has length 1 again.
_OF_WEIGHTS = "torch.nn.utils.parametrizations"
#: Those of ``_OVERWRITING`` with an argument that may hold the old value.
_FROM_ARGUMENT = {"copy_", "set_"}


def keeps_statistics(module: nn.Module) -> bool:
    """Return whether a module is a norm with running statistics.

    PyTorch's kernels need such a module in float32 as a whole, or not at all.
    """
    return isinstance(module, NORMS_WITH_STATISTICS) and getattr(module, "running_mean", None) is not None


def is_running(module: nn.Module, name: str) -> bool:
    """Return whether the module's buffer of this name is a running one."""
    if keeps_statistics(module):
        return True
    kind: Any = type(module)
    if kind.__module__ == _OF_WEIGHTS:
        return False
    found = _running_names(kind)
    return found is None or name in found


@functools.lru_cache(maxsize=4096)
def _running_names(kind: Any) -> frozenset[str] | None:
    """Return the names of a class's running buffers; None if it computes names, so all buffers count."""
    found: set[str] = set()
    todo, seen = ["forward"], set()
    while todo:
        method = todo.pop()
        if method in seen or (hasattr(nn.Module, method) and method != "forward"):
            continue
        seen.add(method)
        function = _source_of(getattr(kind, method, None))
        if function is None:
            continue
        body = _Method(function, getattr(kind, method))
        if body.writes_any:
            return None
        found |= body.names
        todo += sorted(body.called)
    return frozenset(found)


def _source_of(function: Any) -> ast.FunctionDef | ast.AsyncFunctionDef | None:
    """Return the syntax tree of a function; None if there is no source, as for C++ or interactive code."""
    function = inspect.unwrap(function) if callable(function) else function
    if not inspect.isfunction(function):
        return None
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    except (OSError, SyntaxError, TypeError, ValueError, RecursionError):
        return None  # compiled code, or code that was typed in
    first = tree.body[0] if tree.body else None
    return first if isinstance(first, ast.FunctionDef | ast.AsyncFunctionDef) else None


class _Method:
    """The effects of a function on the attributes of its first argument, and on its other arguments.

    Attributes:
        names: attributes with new values that depend on the old ones.
        called: methods that it calls.
        writes_any: whether it changes attributes with names that are only known at run time.
        arguments: positions of the arguments that it changes in such a way.
    """

    def __init__(self, function: ast.FunctionDef | ast.AsyncFunctionDef, live: Any, depth: int = 0) -> None:
        self._globals: dict[str, Any] = getattr(inspect.unwrap(live), "__globals__", {})
        self._depth = depth
        self._parameters = [argument.arg for argument in (*function.args.posonlyargs, *function.args.args)]
        self._me = self._parameters[0] if self._parameters else ""
        #: By local variable, the attributes and arguments that its value depends on, and those that share its memory.
        self._depends: dict[str, set[str]] = {}
        self._is: dict[str, set[str]] = {}
        if depth:  # a function beside the class: its arguments are what may change
            self._is = {name: {name} for name in self._parameters}
        self.names: set[str] = set()
        self.called: set[str] = set()
        self.writes_any = False
        for _ in range(2):  # twice, as a loop may use a name above the line that sets it
            for statement in function.body:
                self._visit(statement)
        self.writes_any = _ANY in self.names
        self.arguments = [at for at, name in enumerate(self._parameters) if name in self.names] if depth else []

    def _visit(self, node: ast.AST) -> None:
        for child in _in_order(node):
            if isinstance(child, ast.Assign):
                for target in child.targets:
                    self._assigned(target, child.value)
            elif isinstance(child, ast.AnnAssign | ast.NamedExpr) and child.value is not None:
                self._assigned(child.target, child.value)
            elif isinstance(child, ast.AugAssign):
                self.names |= self._memory(child.target)
            elif isinstance(child, ast.For):
                self._looped(child)
            elif isinstance(child, ast.Call):
                self._call(child)

    def _assigned(self, target: ast.expr, value: ast.expr) -> None:
        if isinstance(target, ast.Tuple | ast.List):
            for each in target.elts:
                self._assigned(each, value)
        elif isinstance(target, ast.Name):
            self._depends[target.id] = self._depends.get(target.id, set()) | self._needs(value)
            self._is[target.id] = self._is.get(target.id, set()) | self._memory(value)
        else:  # self.name = …, self.name[…] = …, self.name.data = …
            self.names |= self._memory(target) & self._needs(value)

    def _looped(self, loop: ast.For) -> None:
        """Handle ``for name, buffer in self.named_buffers()``."""
        call = loop.iter
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute) and "buffers" in call.func.attr:
            for name in (each.id for each in ast.walk(loop.target) if isinstance(each, ast.Name)):
                self._is[name] = self._depends[name] = {_ANY}

    def _call(self, call: ast.Call) -> None:
        for keyword in call.keywords:
            if keyword.arg == "out":
                written = self._memory(keyword.value)
                self.names |= written & self._needs_of_all(call.args)
        if isinstance(call.func, ast.Attribute):
            self._method_call(call, call.func)
        elif isinstance(call.func, ast.Name):
            self._function_call(call, call.func.id)

    def _function_call(self, call: ast.Call, name: str) -> None:
        """Handle ``setattr(self, "name", …)`` and calls of functions that write into their arguments."""
        if _is_call_of(call, "setattr") and len(call.args) == 3 and self._is_me(call.args[0]):
            self.names |= {_name_of(call.args[1])} & self._needs(call.args[2])
        for at in self._changed_by(name):
            if at < len(call.args):
                self.names |= self._memory(call.args[at])

    def _method_call(self, call: ast.Call, function: ast.Attribute) -> None:
        """Handle ``self.name.mul_(…)``, and ``self.method(…)``, which is then analyzed too."""
        name = function.attr
        changed = self._memory(function.value)
        if self._is_me(function.value) and not self._depth:
            self.called.add(name)
        is_in_place = name.endswith("_") and not name.endswith("__")
        if not is_in_place:
            return
        if name in _FROM_ARGUMENT:
            keywords = [keyword.value for keyword in call.keywords]
            changed &= self._needs_of_all([*call.args, *keywords])
        elif name in _OVERWRITING:
            changed = set()
        self.names |= changed

    def _changed_by(self, name: str) -> list[int]:
        """Return the positions of the arguments that a function of the module's file changes."""
        function: Callable[..., Any] | None = self._globals.get(name)
        source = _source_of(function) if self._depth < _DEPTH else None
        return [] if source is None else _Method(source, function, self._depth + 1).arguments

    def _memory(self, value: ast.AST) -> set[str]:
        """Return the attributes that an expression shares memory with, as the tensor itself, a part or a view."""
        while True:
            if isinstance(value, ast.Name):
                return set(self._is.get(value.id, ()))
            if isinstance(value, ast.Call) and _is_call_of(value, "getattr"):
                has_name = len(value.args) > 1 and self._is_me(value.args[0])
                return {_name_of(value.args[1])} if has_name else set()
            if isinstance(value, ast.Attribute) and self._is_me(value.value) and not self._depth:
                return {_ANY} if value.attr == "_buffers" else {value.attr}
            inner = _part_of(value)
            if inner is None:
                return set()
            value = inner

    def _needs(self, value: ast.AST) -> set[str]:
        """Return the attributes that the value of an expression depends on."""
        found: set[str] = set()
        for node in ast.walk(value):
            if isinstance(node, ast.Attribute | ast.Call):
                found |= self._memory(node)
            elif isinstance(node, ast.Name):
                found |= self._depends.get(node.id, set()) | self._is.get(node.id, set())
        return found

    def _needs_of_all(self, values: Sequence[ast.AST]) -> set[str]:
        return set().union(*map(self._needs, values))

    def _is_me(self, node: ast.AST) -> bool:
        return isinstance(node, ast.Name) and node.id == self._me


#: Stands for every attribute.
_ANY = "*"
#: Functions that are followed from a method into its file.
_DEPTH = 2


def _is_call_of(call: ast.Call, name: str) -> bool:
    return isinstance(call.func, ast.Name) and call.func.id == name


def _part_of(value: ast.AST) -> ast.AST | None:
    """Return the expression that an attribute, an item or a method call is of; None for other expressions."""
    if isinstance(value, ast.Attribute | ast.Subscript | ast.Starred):
        return value.value
    # Methods of tensors often return views, such as ``self.mean.view(-1)``.
    if isinstance(value, ast.Call) and isinstance(value.func, ast.Attribute):
        return value.func.value
    return None


def _name_of(node: ast.expr) -> str:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    return _ANY


def _in_order(node: ast.AST) -> Iterator[ast.AST]:
    """Yield a statement and its parts, in the order of the text."""
    yield node
    for child in ast.iter_child_nodes(node):
        yield from _in_order(child)
