"""The expressions of a script that hold an estimator, and the functions that return one."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from smp_estimator.migration.source import assignments

#: Calls whose result has the same items as their argument.
_SAME_ITEMS = ("list", "tuple", "sorted", "reversed", "set")

#: Methods that add an item to a container.
_ADDING = ("append", "add", "insert", "setdefault")


@dataclass
class Holders:
    """What holds estimators; a name means the same in all functions.

    Attributes:
        makes: returns whether a call creates an estimator.
        single: variables that hold one, as they are written.
        many: variables that hold a container of them.
        makers: functions that return one.
        makers_of_many: functions that return a container of them.
        makers_at: functions that return a tuple, with the places of estimators in it.
    """

    makes: Callable[[ast.AST], bool]
    single: set[str] = field(default_factory=set)
    many: set[str] = field(default_factory=set)
    makers: set[str] = field(default_factory=set)
    makers_of_many: set[str] = field(default_factory=set)
    makers_at: dict[str, set[int]] = field(default_factory=dict)

    def read(self, trees: Iterable[ast.AST]) -> None:
        """Take in the statements of all pieces, until nothing new is found."""
        nodes: list[ast.AST] = []
        for tree in trees:
            nodes += ast.walk(tree)
        functions = {node.name: node for node in nodes if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}
        before = -1
        # Code may use an estimator above the place that makes it, as in a function: each pass may find more.
        while self._size() != before:
            before = self._size()
            self._read_once(nodes, functions)

    def _read_once(self, nodes: list[ast.AST], functions: Mapping[str, ast.FunctionDef | ast.AsyncFunctionDef]) -> None:
        for node in nodes:
            self._statement(node)
            if isinstance(node, ast.Call):
                called = functions.get(_last_name(node.func))
                if called is not None:
                    self._arguments(node, called)
        for function in functions.values():
            self._returns(function)

    def is_one(self, node: ast.AST) -> bool:
        """Return whether an expression is an estimator."""
        if self.makes(node):
            return True
        if isinstance(node, ast.Call):
            return _last_name(node.func) in self.makers
        if isinstance(node, ast.Subscript):
            return ast.unparse(node) in self.single or self._is_many(node.value)
        if isinstance(node, ast.IfExp):
            return self.is_one(node.body) or self.is_one(node.orelse)
        if isinstance(node, ast.NamedExpr):
            return self.is_one(node.value)
        if isinstance(node, ast.Attribute):
            # An attribute that a method has set is read from outside by another name of the object.
            return ast.unparse(node) in self.single or f"self.{node.attr}" in self.single
        return isinstance(node, ast.Name) and node.id in self.single

    def _is_many(self, node: ast.AST) -> bool:
        if isinstance(node, ast.List | ast.Tuple | ast.Set):
            return any(map(self.is_one, node.elts))
        if isinstance(node, ast.Dict):
            return any(map(self.is_one, node.values))
        if isinstance(node, ast.ListComp | ast.SetComp | ast.GeneratorExp):
            return self.is_one(node.elt)
        if isinstance(node, ast.DictComp):
            return self.is_one(node.value)
        if isinstance(node, ast.Call):
            return self._returns_many(node)
        return isinstance(node, ast.Name | ast.Attribute) and ast.unparse(node) in self.many

    def _returns_many(self, node: ast.Call) -> bool:
        if isinstance(node.func, ast.Attribute) and node.func.attr == "values":
            return self._is_many(node.func.value)
        if _last_name(node.func) in self.makers_of_many:
            return True
        keeps_items = isinstance(node.func, ast.Name) and node.func.id in _SAME_ITEMS
        return keeps_items and any(map(self._is_many, node.args))

    def _size(self) -> int:
        found = (self.single, self.many, self.makers, self.makers_of_many)
        return sum(map(len, found)) + sum(map(len, self.makers_at.values()))

    def _statement(self, node: ast.AST) -> None:
        for target, value in assignments(node):
            self._bind(target, value)
        if isinstance(node, ast.For | ast.AsyncFor | ast.comprehension):
            self._loop(node.target, node.iter)
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            if node.func.attr in _ADDING:
                self._add(node.func.value, node.args)

    def _bind(self, target: ast.expr, value: ast.expr) -> None:
        if isinstance(target, ast.Tuple | ast.List):
            self._bind_parts(target.elts, value)
            return
        if self.is_one(value):
            self.single.add(ast.unparse(target))
            if isinstance(target, ast.Subscript):
                self.many.add(ast.unparse(target.value))
        if self._is_many(value):
            self.many.add(ast.unparse(target))

    def _bind_parts(self, targets: list[ast.expr], value: ast.expr) -> None:
        places: set[int] = set()
        if isinstance(value, ast.Call):
            places = self.makers_at.get(_last_name(value.func), places)
        has_items = self._is_many(value)
        values = value.elts if isinstance(value, ast.Tuple | ast.List) else []
        for number, target in enumerate(targets):
            if number < len(values):
                self._bind(target, values[number])
            elif has_items or number in places:
                self.single.add(ast.unparse(target))

    def _add(self, container: ast.expr, values: list[ast.expr]) -> None:
        parts: list[ast.expr] = []
        for value in values:
            parts += value.elts if isinstance(value, ast.Tuple) else [value]
        has_estimator = any(map(self.is_one, parts))
        if has_estimator:
            self.many.add(ast.unparse(container))

    def _loop(self, target: ast.expr, items: ast.expr) -> None:
        parts = [target]
        sources: list[ast.expr | None] = [items]
        if isinstance(target, ast.Tuple | ast.List):
            parts = target.elts
            sources = _sources_of_parts(items, len(parts))
        for part, source in zip(parts, sources, strict=False):
            if source is not None and self._is_many(source):
                self.single.add(ast.unparse(part))

    def _arguments(self, node: ast.Call, called: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        names = [each.arg for each in (*called.args.posonlyargs, *called.args.args)]
        # The object that a method belongs to is not among the arguments of its call.
        if names[:1] == ["self"]:
            names = names[1:]
        given = list(zip(names, node.args, strict=False))
        given += [(word.arg, word.value) for word in node.keywords if word.arg is not None]
        for name, value in given:
            if self.is_one(value):
                self.single.add(name)
            if self._is_many(value):
                self.many.add(name)

    def _returns(self, function: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        for node in ast.walk(function):
            if not isinstance(node, ast.Return) or node.value is None:
                continue
            if self.is_one(node.value):
                self.makers.add(function.name)
            elif isinstance(node.value, ast.Tuple):
                self._returns_tuple(function.name, node.value)
            elif self._is_many(node.value):
                self.makers_of_many.add(function.name)

    def _returns_tuple(self, function: str, value: ast.Tuple) -> None:
        places = {number for number, part in enumerate(value.elts) if self.is_one(part)}
        if places:
            self.makers_at.setdefault(function, set()).update(places)


def _sources_of_parts(items: ast.expr, count: int) -> list[ast.expr | None]:
    """Return, by position in a loop's target of ``count`` names, the expression whose items a name takes; None if unknown."""
    if not isinstance(items, ast.Call):
        return [items] * count
    name = _last_name(items.func)
    sources: list[ast.expr | None] = [None] * count
    if name == "items" and isinstance(items.func, ast.Attribute):
        sources[-1] = items.func.value
    elif name == "enumerate" and items.args:
        sources[-1] = items.args[0]
    elif name == "zip":
        sources = list(items.args)
    return sources


def _last_name(node: ast.AST) -> str:
    """Return the last word of a dotted name, or an empty string."""
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else ""
